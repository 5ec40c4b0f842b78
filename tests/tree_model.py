"""The slow, obvious model of a token tree: Python lists and plain recursion, one tree at a time.

The property tests hold the array code of `draftree.tree` to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st
from tree_paths import from_arrays

# Time limits on single examples only fail on a busy machine.
settings.register_profile("draftree", deadline=None)
settings.load_profile("draftree")


@dataclass
class Model:
    """Node 0 is the root; parents[i] < i. logp and source as in TokenTree, without padding."""

    tokens: list[int]
    parents: list[int]
    logp: list[float]
    source: list[int]

    def __len__(self):
        return len(self.tokens)

    def above(self, node):
        """Return the node and all above it, root first."""
        return [] if node < 0 else [*self.above(self.parents[node]), node]

    def path(self, node):
        return tuple(self.tokens[i] for i in self.above(node))

    def depth(self, node):
        return len(self.above(node)) - 1

    def children(self, node):
        return [i for i in range(1, len(self)) if self.parents[i] == node]

    def capped(self, node):
        return min(self.logp[i] for i in self.above(node))

    def keep(self, wanted):
        """Return the model of the nodes whose whole path is wanted (the root always is), and their ids."""
        ids = [i for i in range(len(self)) if all(j in wanted for j in self.above(i)[1:])]
        place = {old: new for new, old in enumerate(ids)} | {-1: -1}
        return (
            Model(
                [self.tokens[i] for i in ids],
                [place[self.parents[i]] for i in ids],
                [self.logp[i] for i in ids],
                [self.source[i] for i in ids],
            ),
            ids,
        )

    def tree(self):
        return from_arrays(
            self.tokens[1:],
            [p - 1 for p in self.parents[1:]],
            self.logp[1:],
            self.source[1:],
            root=self.tokens[0],
        )

    def named(self):
        """{path: (logp, source)}; only for trees without equal paths."""
        assert len({self.path(i) for i in range(len(self))}) == len(self)
        return {self.path(i): (self.logp[i], self.source[i]) for i in range(len(self))}


def merged(models):
    """{path: (logp, source)} of the union: the better probability, and all sources."""
    union = {}
    for model in models:
        for i in range(len(model)):
            old, mask = union.get(model.path(i), (-math.inf, 0))
            union[model.path(i)] = (max(old, model.logp[i]), mask | model.source[i])
    return union


def read(tree, b=0):
    """Tree b of a TokenTree as a model; checks what padding must look like on the way."""
    n = tree.sizes[b]
    assert tree.tokens.dtype == tree.parents.dtype == tree.source.dtype == torch.long
    assert tree.logp.dtype == torch.float32
    assert tree.tokens.shape == tree.parents.shape == tree.logp.shape == tree.source.shape
    assert tree.tokens.shape == (tree.batch, tree.width)
    assert set(tree.tokens[b, n:].tolist()) <= {0}
    assert set(tree.parents[b, n:].tolist()) <= {-1}
    assert set(tree.logp[b, n:].tolist()) <= {-math.inf}
    assert set(tree.source[b, n:].tolist()) <= {0}
    model = Model(*(column[b, :n].tolist() for column in (tree.tokens, tree.parents, tree.logp, tree.source)))
    assert (model.parents[0], model.logp[0], model.source[0]) == (-1, 0.0, 0)
    assert all(0 <= model.parents[i] < i for i in range(1, n))
    return model


# Quarters are exact in float32, so that ties are ties on both sides; few tokens, so that paths collide.
TOKENS = st.integers(0, 3)
QUARTERS = st.integers(-12, 0).map(lambda q: q / 4)


@st.composite
def models(draw, max_nodes=14, root=TOKENS, connected=False):
    """Trees with duplicate siblings; `connected`: children never outrank their parents."""
    n = draw(st.integers(0, max_nodes))
    model = Model([draw(root)], [-1], [0.0], [0])
    deep = draw(st.booleans())
    for i in range(1, n + 1):
        model.tokens.append(draw(TOKENS))
        model.parents.append(draw(st.integers(max(0, i - 2) if deep else 0, i - 1)))
        score = draw(QUARTERS)
        model.logp.append(score + (model.logp[model.parents[i]] if connected else 0.0))
        model.source.append(draw(st.integers(1, 7)))
    return model


def batches(**options):
    return st.lists(models(**options), min_size=1, max_size=4)
