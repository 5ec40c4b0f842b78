"""The compiled trie and its oracle give the same drafts, to the last element, under any sequence of calls.

Small alphabets with a live token 0 and an end-of-sequence token inside make branches collide, and small
capacities keep the clock hand busy, so that freed nodes are reused under open branches.
"""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tree_paths import path_of
from trie_oracle import oracle

from draftree.drafting.lookahead import Trie
from draftree.drafting.lookahead import trie as trie_module
from draftree.drafting.lookahead.trie import load_library
from draftree.tree import TokenTree

try:
    load_library()
except OSError as error:
    pytest.skip(f"the compiled trie is not built ({error}): python hatch_build.py", allow_module_level=True)

EOS = 3
TOKENS = st.lists(st.integers(0, 4), max_size=24)
MODE = st.sampled_from(["hierarchical", "parallel", "single"])
SOURCES = st.sampled_from(["prompt", "output", "mix"])
REQUEST = st.integers(0, 2)
STEP = st.one_of(
    st.tuples(st.just("begin"), REQUEST, TOKENS),
    st.tuples(st.just("extend"), REQUEST, TOKENS),
    st.tuples(st.just("extend"), REQUEST, st.lists(st.integers(0, 2), max_size=6)),
    st.tuples(st.just("retrieve"), REQUEST, st.integers(1, 20), st.integers(1, 7), MODE, SOURCES),
    st.tuples(st.just("end"), REQUEST),
    st.tuples(st.just("warm"), TOKENS),
    st.tuples(st.just("dump")),
)
OPTIONS = st.fixed_dictionaries(
    {
        "branch_length": st.integers(1, 6),
        "decoding_length": st.integers(1, 6),
        "max_query_length": st.integers(1, 8),
        "min_nodes": st.sampled_from([None, 1, 30]),
        "prompt_weight": st.sampled_from([0.3, 1.0, 2.0, 7.5]),
        "capacity": st.sampled_from([1, 2, 16]),
        "max_nodes": st.sampled_from([1, 2, 17, 40, 100, 5000]),
        "prune": st.booleans(),
        "eliminate": st.booleans(),
        "eos_token_ids": st.sampled_from([(), (EOS,), (EOS, 0)]),
    }
)


def assert_same_dump(c: Trie, python: Trie) -> None:
    for left, right in zip(c._store.dump(), python._store.dump(), strict=True):
        np.testing.assert_array_equal(left, right)


def check_order(tree, draft):
    """The draft's nodes below a root, parents first and logp falling: paths and their parts stay what they were."""
    assert tree.sizes == (len(draft.tokens) + 1,)
    assert (tree.tokens[0, 0], tree.parents[0, 0], tree.logp[0, 0], tree.source[0, 0]) == (7, -1, 0, 0)
    assert (tree.parents[0, 1:] < torch.arange(1, tree.width)).all()
    assert (tree.logp[0, 1:] <= tree.logp[0, :-1]).all()
    paths = []
    for row in range(len(draft.tokens)):
        path, at = [], row
        while at >= 0:
            path.append(int(draft.tokens[at]))
            at = int(draft.parents[at])
        paths.append(([7, *reversed(path)], float(draft.logp[row]), int(draft.source[row])))
    nodes = range(1, tree.width)
    assert sorted(paths) == sorted((path_of(tree, 0, n), float(tree.logp[0, n]), int(tree.source[0, n])) for n in nodes)


def check_tree(draft, budget, depth, mode, eos):
    """What any draft promises: parents first, within budget and depth, nothing after an end, falling logp."""
    n = len(draft.tokens)
    assert n <= budget
    level = np.zeros(n, int)
    for row in range(n):
        parent = draft.parents[row]
        assert -1 <= parent < row
        if parent >= 0:
            level[row] = level[parent] + 1
            assert draft.tokens[parent] not in eos
            assert draft.logp[row] <= draft.logp[parent]
    assert n == 0 or level.max() < depth
    assert ((draft.source >= 1) & (draft.source <= 3)).all()
    assert np.isfinite(draft.logp).all()
    if mode == "single":
        assert (draft.parents == np.arange(-1, n - 1)).all()
    if mode == "hierarchical":
        paths = set(zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True))
        assert len(paths) == n
    if mode == "parallel":
        assert all(parent in (-1, row - 1) for row, parent in enumerate(draft.parents))


# Found by a long run: a parent under a busy hand once decayed to a count of zero.
@example(
    options={"branch_length": 2, "decoding_length": 1, "capacity": 2, "max_nodes": 2, "eliminate": False},
    steps=[("begin", 0, [0]), ("warm", [0, 1]), ("retrieve", 0, 1, 1, "hierarchical", "output")],
    scan=1,
)
@settings(max_examples=300, deadline=None)
@given(options=OPTIONS, steps=st.lists(STEP, max_size=40), scan=st.sampled_from([1, 2, 256]))
def test_twins_agree(options, steps, scan):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftree.drafting.lookahead.dict_trie.SCAN", scan)
        patch.setattr(trie_module, "SCAN", scan)
        twins = [Trie(**options), oracle(**options)]
    live: set[int] = set()
    for name, *arguments in steps:
        if name == "dump":
            assert_same_dump(*twins)
            continue
        if name in ("extend", "retrieve", "end") and arguments[0] not in live:
            continue
        if name == "begin" and arguments[0] in live:
            continue
        if name == "retrieve":
            request, budget, depth, mode, sources = arguments
            drafts = [t.retrieve(request, budget, depth=depth, mode=mode, sources=sources) for t in twins]
            for left, right in zip(*drafts, strict=True):
                np.testing.assert_array_equal(left, right)
            check_order(TokenTree.from_drafts([7], [drafts[0]], [budget]), drafts[0])
            check_tree(drafts[0], budget, min(depth, options["branch_length"]), mode, options.get("eos_token_ids", ()))
            continue
        for trie in twins:
            getattr(trie, name)(*arguments)
        if name == "begin":
            live.add(arguments[0])
        elif name == "end":
            live.remove(arguments[0])
        assert twins[0].nodes == twins[1].nodes
    assert_same_dump(*twins)


@pytest.mark.parametrize("max_nodes", [3000, 2**20])
def test_twins_agree_at_length(max_nodes):
    """Long enough for the hash to grow many times, and at 3000 nodes for the hand to go round and round."""
    rng = np.random.default_rng(max_nodes)
    twins = [make(max_nodes=max_nodes, eos_token_ids=[EOS]) for make in (Trie, oracle)]
    for request in range(12):
        prompt = (rng.zipf(1.4, 150) % 90).tolist()
        for trie in twins:
            trie.begin(request, prompt)
        for _ in range(20):
            run = (rng.zipf(1.4, 5) % 90).tolist()
            run = [token for token in run if token != EOS]
            drafts = [trie.retrieve(request, 48) for trie in twins]
            for left, right in zip(*drafts, strict=True):
                np.testing.assert_array_equal(left, right)
            for trie in twins:
                trie.extend(request, run)
        if request % 3:
            for trie in twins:
                trie.end(request)
        assert_same_dump(*twins)
    assert twins[0].nodes > 5000


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(TOKENS, max_size=4), prompt=TOKENS, more=TOKENS)
def test_without_a_compiler_the_same_paths_are_found(texts, prompt, more):
    """Below all bounds the plain store has the same nodes and probabilities; equal paths may change places."""
    found = []
    for compiled in (True, False):
        trie = Trie(branch_length=4, prune=False, eos_token_ids=[EOS], compiled=compiled)
        for text in texts:
            trie.warm(text)
        trie.begin(1, prompt)
        trie.extend(1, more)
        draft = trie.retrieve(1, 500)
        check_tree(draft, 500, 4, "hierarchical", (EOS,))
        paths = {}
        for token, parent, logp, source in zip(*(column.tolist() for column in draft), strict=True):
            path = (*(list(paths)[parent] if parent >= 0 else ()), token)
            paths[path] = (round(logp, 4), source)
        found.append((paths, trie.nodes))
    assert found[0] == found[1]
