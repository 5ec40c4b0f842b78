"""Trees on a terminal: every node is there, the likeliest child first, and what cannot be seen is made visible."""

import torch
from rich.console import Console
from rich.text import Text

from draftree.tree import TokenTree, to_rich

WORDS = [" the", "a\nb", "$x$", ""]


def sample():
    tree = TokenTree.from_paths(0, [[1, 2], [2, 3], [1, 0]], [[-0.1, -1.0], [-3.0, -0.5], [-0.1, -0.2]], [1, 2, 4])
    return TokenTree.stack([TokenTree.roots(torch.tensor([3])), tree])


def lines(tree, b=0, decode=None):
    console = Console(width=400, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(to_rich(tree, b, decode, lambda node, label: Text(f"{label} ({node})")))
    return captured.get().splitlines()


def test_the_likeliest_child_comes_first():
    assert lines(sample(), 1) == ["0 (0)", "├── 1 (1)", "│   ├── 0 (5)", "│   └── 2 (2)", "└── 2 (3)", "    └── 3 (4)"]


def test_spaces_line_breaks_and_empty_tokens_are_shown():
    assert lines(sample(), 0, WORDS.__getitem__) == ["∅ (0)"]
    assert lines(sample(), 1, WORDS.__getitem__)[:2] == ["␣the (0)", "├── a\\nb (1)"]


def test_a_deep_chain_keeps_every_node():
    shown = lines(TokenTree.from_arrays(range(100, 164), range(-1, 63), root=7))
    assert len(shown) == 65
    assert all(str(99 + i) in line for i, line in enumerate(shown) if i)
