"""Python of the pages runs as it stands there, block after block in one empty namespace, as a reader would type it.

Folders of the names that the pages use stand ready. A block that cannot run in a test says why in a comment right above
it.
"""

import re
import shutil
from pathlib import Path

import pytest

from draftree.demo_model import embedded
from draftree.drafting.folder import demo_drafter

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md"))]
PAGES += sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/[dm]*/*.md"))  # developer and methods
BLOCK = re.compile(r"^(?:<!-- not run: ([^\n]+) -->\n\n?)?```python\n(.*?)^```", re.M | re.S)
DRAFTERS = {"medusa-folder": "medusa", "bita-folder": "bita", "hidden-transfer-folder": "hidden-transfer"}
DRAFTERS |= {"early-head-folder": "early-head"}


def blocks(page):
    """(why it is not run or None, text) of every block of Python."""
    return [match.groups() for match in BLOCK.finditer((ROOT / page).read_text(encoding="utf-8"))]


WITH_PYTHON = [page for page in PAGES if blocks(page)]


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with what the pages name."""
    folder = tmp_path_factory.mktemp("desk")
    with embedded("chat_4m") as model, embedded("chat_600k") as small, embedded("drafters") as drafters:
        shutil.copytree(model, folder / "path" / "or" / "hub-name")
        shutil.copytree(small, folder / "a-small-model-of-the-family")
        for name, kind in DRAFTERS.items():
            shutil.copytree(drafters / kind, folder / name)
        for file in model.glob("*token*"):
            shutil.copy(file, folder / "a-small-model-of-the-family")
    return folder


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_of_every_page_runs(page, desk, monkeypatch, capsys):
    monkeypatch.chdir(desk)
    names: dict[str, object] = {}
    ran = 0
    for why, block in blocks(page):
        if why is None:
            exec(compile(block, page, "exec"), names)
            ran += 1
    assert ran or all(why for why, _ in blocks(page))


def test_few_blocks_are_left_out():
    left = [why for page in WITH_PYTHON for why, _ in blocks(page) if why is not None]
    assert all(why.startswith("needs ") for why in left)
    assert len(left) <= 9


def test_the_drafters_of_the_package_are_those_of_the_pages(demo):
    for name, kind in DRAFTERS.items():
        assert kind == "early-head" or demo_drafter(kind, demo.model) is not None, name
