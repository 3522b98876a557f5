"""Hooks of the documents' site (mkdocs.yml): navigation from the index, files outside `docs/`, and `llms.txt`.

Pages link to files of the repository as they do on GitHub. A file that a page links to becomes a part of the site,
below `repository/`; a link to a folder becomes its text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_ENTRY = re.compile(r"^- \[([^]]+)\]\(([^)]+)\)(?:: (.+))?$", re.MULTILINE)


def on_config(config: Any) -> Any:
    """Make the navigation of the index: its sections, and their pages."""
    config.nav = [{"Documents": "index.md"}]
    for section, entries in _index():
        config.nav.append({section: [{title: page} for title, page, _ in entries]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the files of the repository that pages link to."""
    from mkdocs.structure.files import File

    pending = [DOCS / file.src_uri for file in files.documentation_pages()]
    seen = set(pending)
    while pending:
        source = pending.pop()
        for match in _LINK.finditer(source.read_text(encoding="utf-8")):
            target = _target(source, match[3])
            if target is None or target in seen or not target.is_file() or target.is_relative_to(DOCS):
                continue
            seen.add(target)
            files.append(File.generated(config, _site_uri(target), abs_src_path=str(target)))
            if target.suffix == ".md":
                pending.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links lead to where their targets are on the site."""
    here = PurePosixPath(page.file.src_uri)
    source = DOCS / here if here.parts[0] != "repository" else ROOT / here.relative_to("repository")

    def moved(match: re.Match[str]) -> str:
        target = _target(source, match[3])
        if target is None:
            return match[0]
        if target.is_dir():
            return match[2]
        link = os.path.relpath(_site_uri(target), here.parent)
        return f"{match[1]}[{match[2]}]({link}{match[4] or ''})"

    return _LINK.sub(moved, markdown)


def on_post_build(config: Any) -> None:
    """Write llms.txt, in which language models find what each page is about."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for section, entries in _index():
        lines += ["", f"## {section.partition(':')[0]}", ""]
        lines += [
            f"- [{title}]({page.replace('.md', '.html')})" + f": {text}" * bool(text) for title, page, text in entries
        ]
    (Path(config.site_dir) / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _index() -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Return the sections of the index, each with title, page and summary of its entries."""
    _, *sections = re.split(r"^## ", (DOCS / "index.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [(section.splitlines()[0].partition(":")[0], _ENTRY.findall(section)) for section in sections]


def _target(source: Path, link: str) -> Path | None:
    """Return the file or folder of this checkout that a link leads to, None for an address elsewhere."""
    if "://" in link or link.startswith("mailto:"):
        return None
    return Path(os.path.normpath(source.parent / link))


def _site_uri(target: Path) -> str:
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    return f"repository/{target.relative_to(ROOT).as_posix()}"
