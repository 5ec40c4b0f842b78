"""Counts of guesses that came true: the compiled form is the plain one, to the last tree."""

from __future__ import annotations

import numpy as np
import pytest

from draftree.shaping import counts
from draftree.tree import TokenTree


def test_the_compiled_counts_are_the_plain_ones() -> None:
    library = counts._library()
    if library is None:
        pytest.skip("draftree was built without a C compiler")
    plain, compiled = counts.Counts(), counts.CompiledCounts(library)
    random = np.random.default_rng(3)
    taken = 0
    for step in range(300):
        n = int(random.integers(1, 40))
        parents = [int(random.integers(-1, i)) if i else -1 for i in range(n)]
        logp = np.sort(-random.exponential(random.choice([0.2, 1.0, 4.0]), n).astype(np.float32))[::-1]
        tokens = random.integers(0, 3, n)  # siblings may share a token
        tree = TokenTree.from_arrays(tokens, parents, logp, root=1)
        seconds = np.linspace(1.0, 1.0 + n * random.random(), n + 1)
        for trust in (0.3, 1.0, 2.5):
            found, expected = compiled.weigh(tree, trust, seconds), plain.weigh(tree, trust, seconds)
            assert found is not None
            assert expected is not None
            assert found[0] == expected[0]
            assert found[1] == pytest.approx(expected[1])
        drafted = counts.Drafted(2, TokenTree.stack([TokenTree.from_arrays([], [], root=0), tree]), 1)
        text = [7, 1, *random.integers(0, 3, int(random.integers(0, 6))).tolist()]
        ended = bool(random.random() < 0.5) and len(text) > 2
        lesson = plain.learn(drafted, text, ended=ended)
        assert compiled.learn(drafted, text, ended=ended) == (None if lesson is None else pytest.approx(lesson))
        np.testing.assert_allclose(compiled.seen, plain.seen)
        np.testing.assert_allclose(compiled.right, plain.right)
        taken += lesson is not None and lesson.found > 0
        if step % 16 == 0:
            plain.read()
            compiled.read()
    assert taken > 50
    unsorted = TokenTree.from_arrays([1, 2], [-1, -1], [-2.0, -1.0], root=0)
    assert compiled.weigh(unsorted, 1.0, np.ones(3)) is None
    assert plain.weigh(unsorted, 1.0, np.ones(3)) is None
