"""The trie stays negligible beside a forward pass: time a call, bytes a node, no growth once it is full.

The bounds are three times what the design asks for, because the machines that run tests are shared.
"""

import pytest

from benchmarks.drafters.trie import measure_trie
from draftree.drafting.lookahead.c_trie import load_library

try:
    load_library()
except OSError as error:
    pytest.skip(f"the C twin is not built ({error}): python hatch_build.py", allow_module_level=True)


@pytest.mark.slow
@pytest.mark.parametrize("full", [False, True])
def test_calls_are_quick_and_nodes_small(full):
    figures = measure_trie(warm_answers=800 if full else 0, max_nodes=200_000 if full else 2**20, backend="c")
    assert figures["begin_us"]["median"] <= 3000
    assert figures["extend_us"]["median"] <= 30
    assert figures["retrieve_us"]["median"] <= 300
    assert figures["retrieve_us"]["p99"] <= 900
    assert figures["bytes_per_node"] <= 64
    if full:
        assert figures["bytes_grown"] == 0
        assert figures["nodes"] > 199_000
