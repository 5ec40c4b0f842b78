"""Text and pictures of trees: everything in them is there, and a missing matplotlib is explained."""

import sys

import pytest
import torch

from draftree.tree import TokenTree, to_picture, to_text
from draftree.tree.render import _rows

WORDS = [" the", "a\nb", "$x$", ""]


def sample():
    tree = TokenTree.from_paths(0, [[1, 2], [2, 3], [1, 0]], [[-0.1, -1.0], [-3.0, -0.5], [-0.1, -0.2]], [1, 2, 4])
    return TokenTree.stack([TokenTree.roots(torch.tensor([3])), tree])


def test_text_lists_the_likeliest_child_first():
    assert to_text(sample(), 1).splitlines() == [
        "0",
        "├── 1  0.905  from 0+2",
        "│   ├── 0  0.741  from 2",
        "│   └── 2  0.333  from 0",
        "└── 2  0.050  from 1",
        "    └── 3  0.030  from 1",
    ]


def test_text_shows_spaces_line_breaks_and_empty_tokens():
    assert to_text(sample(), 0, WORDS.__getitem__) == "∅"
    lines = to_text(sample(), 1, WORDS.__getitem__).splitlines()
    assert lines[0] == "␣the"
    assert lines[1] == "├── a\\nb  0.905  from 0+2"


def test_text_of_a_deep_chain_keeps_every_node():
    tree = TokenTree.from_arrays(range(100, 164), range(-1, 63), root=7)
    lines = to_text(tree).splitlines()
    assert len(lines) == 65
    assert all(str(99 + i) in line for i, line in enumerate(lines) if i)


def test_picture_gives_leaves_lines_of_their_own_and_parents_their_likeliest_childs():
    # Nodes: 0 > 1 > {2, 5}, 0 > 3 > 4; node 5 (token 0) is likelier than node 2.
    assert _rows(sample(), 1) == [0, 0, 1, 2, 2, 0]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_picture_holds_the_tree(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"tree.{suffix}"
    to_picture(sample(), path, 1)
    data = path.read_bytes()
    if suffix == "png":
        assert data.startswith(b"\x89PNG")
    else:
        # The svg backend leaves each text as a comment beside its glyphs: depths 1 and 2 and the tokens.
        assert [data.count(f"<!-- {text} -->".encode()) for text in ("root", 0, 1, 2, 3)] == [1, 2, 2, 3, 1]
    root_alone = tmp_path / f"root.{suffix}"
    to_picture(sample(), root_alone, 0, WORDS.__getitem__)
    assert root_alone.stat().st_size > 0


def test_picture_names_the_extra_when_matplotlib_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install -e .\.\[bench\]"):
        to_picture(sample(), tmp_path / "tree.png", 1)
