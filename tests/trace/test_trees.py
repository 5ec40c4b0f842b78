"""Trees on a terminal: every node is there, the likeliest child first, and what cannot be seen is made visible."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from draftree.cli.trace import _tree

WORDS = [" the", "a\nb", "$x$", ""]


def lines(tokens: list[int], parents: list[int], logp: list[float | None], words: Any = WORDS) -> list[str]:
    member = {"tokens": tokens, "parents": parents, "logp": logp, "sources": [None, *[0] * (len(tokens) - 1)]}
    trace: Any = SimpleNamespace(runs=[{"sources": ["trie"]}], tokens=words)
    console = Console(width=400, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(_tree(trace, {"run": 0}, member | {"accepted": [0], "pruned": []}))
    return captured.get().splitlines()


def test_the_likeliest_child_comes_first_and_invisible_text_is_shown() -> None:
    half, most = math.log(0.5), math.log(0.75)
    assert lines([3, 1, 2, 0, 2], [-1, 0, 0, 2, 0], [None, half, most, half, None]) == [
        "∅",
        "├── $x$  0.75  trie",
        "│   └── ␣the  0.50  trie",
        "├── a\\nb  0.50  trie",
        "└── $x$  trie",
    ]


def test_a_deep_chain_keeps_every_node() -> None:
    shown = lines(list(range(64)), list(range(-1, 63)), [None] * 64, [str(100 + i) for i in range(64)])
    assert len(shown) == 64
    assert all(str(100 + i) in line for i, line in enumerate(shown))
