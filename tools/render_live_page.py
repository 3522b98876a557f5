"""Write the tables of `docs/reference/live-stream.md` as the code has them, and with --picture the live page's picture.

    python tools/render_live_page.py [--picture]

The tables stand between two marks. The picture is a simulated run, recorded and shown by the page in Chromium. A unit
test compares the tables with the code, and another the picture with a drawn one.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

from sglang_ext.live.decide.messages import FRAME_FIELDS, HELLO_FIELDS, ROWS, described

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "reference" / "live-stream.md"
PICTURE = ROOT / "docs" / "live-page.png"
PICTURE_AT_S = 40.0  # of the run
BEGIN, END = "<!-- begin: tools/render_live_page.py -->", "<!-- end -->"


def main() -> None:
    """Write what has changed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--picture", action="store_true", help="draw docs/live-page.png, too")
    arguments = parser.parse_args()
    DOCUMENT.write_text(rendered(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    if arguments.picture:
        sys.path.insert(0, str(ROOT / "tests"))
        asyncio.run(draw(PICTURE))
        print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size // 1000} KB")


def rendered(document: str) -> str:
    """The document with the tables as the code has them. ValueError where it lacks the marks."""
    before, _, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{DOCUMENT} lacks {BEGIN} or {END}")
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def tables() -> str:
    """Messages, then each kind of row."""
    parts = []
    for title, fields in (("The `hello` message", HELLO_FIELDS), ("A `frame` message", FRAME_FIELDS)):
        parts.append(
            f"**{title}**\n\n| field | |\n|---|---|\n" + "\n".join(f"| `{k}` | {v} |" for k, v in fields.items())
        )
    for name, row in ROWS.items():
        about = " ".join((row.__doc__ or "").split())
        lines = [f"| `{field}` | {_kind(types)} | {text} |" for field, text, types in described(row)]
        parts.append(f"**`{name}`**: {about}\n\n| field | type | |\n|---|---|---|\n" + "\n".join(lines))
    return "\n\n".join(parts)


def _kind(types: dict[str, Any]) -> str:
    kinds = types["type"] if isinstance(types["type"], list) else [types["type"]]
    return " or ".join(kinds)


async def draw(picture: Path) -> None:
    """Record a simulated run, and take a picture of the page that shows all of it."""
    from sglang_ext.live.recording import write_page
    from support.browser import browser
    from support.live_recordings import shared_recording

    with tempfile.TemporaryDirectory(prefix="live-page-") as folder:
        page_file = Path(folder) / "page.html"
        write_page(shared_recording(Path(folder), seconds=PICTURE_AT_S + 1), page_file)
        async with browser() as opened:
            page = await opened.open(page_file.as_uri(), width=1600, height=1480, calm=True)
            await page.until("window.liveView && liveView.state.inst.size > 0")
            await page.evaluate(
                f"liveView.player.playing = false; liveView.player.seek({PICTURE_AT_S}); liveView.player.show()"
            )
            await page.evaluate(
                "document.getElementById('wall').click(); document.getElementById('player').hidden = true"
            )
            await page.until("document.querySelectorAll('#requests button').length > 5")
            await page.evaluate("document.querySelectorAll('#requests button')[2].click()")
            await asyncio.sleep(1.5)
            await page.screenshot(picture)


if __name__ == "__main__":
    main()
