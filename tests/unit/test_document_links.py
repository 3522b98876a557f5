"""Links between documents lead somewhere, and every page is in the index under its kind."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INDEX = ROOT / "docs/index.md"
KINDS = ("tutorial", "how-to", "reference", "explanation")


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


DOCUMENTS = tracked("*.md")
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def without_code(text: str) -> str:
    return re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub and the site give to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", without_code(path.read_text(encoding="utf-8")), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("path", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS])
def test_links_lead_somewhere(path: Path) -> None:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text(encoding="utf-8"))):
        target, _, anchor = link.partition("#")
        if "://" in link:
            continue
        found = path.parent / target if target else path
        if not found.exists() or (anchor and anchor not in anchors(found)):
            dead.append(link)
    assert not dead


def test_what_names_a_page_names_one_that_is_there() -> None:
    dead = []
    for path in tracked("*.py", "*.md", "*.yaml", "*.toml", "Makefile", "*.Dockerfile", "tools/*"):
        names = re.findall(r"(?<![\w/.])docs/[\w/-]+\.(?:md|png)", path.read_text(encoding="utf-8"))
        dead += [f"{path.relative_to(ROOT)}: {name}" for name in names if not (ROOT / name).exists()]
    assert not dead


def test_every_page_is_in_the_index_under_its_kind() -> None:
    listed = re.findall(r"^- \[[^]]+\]\(([^)]+)\)", INDEX.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == [str(page.relative_to(INDEX.parent)) for page in PAGES if page != INDEX]
    sections = [KINDS.index(link.split("/")[0]) for link in listed if "/" in link]
    assert sections == sorted(sections)


def test_the_readme_is_of_one_screen() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 130
