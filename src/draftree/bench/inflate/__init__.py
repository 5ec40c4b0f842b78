"""Inflation: a model made larger in memory without a change in what it says, and drafters that fit it.

`model` describes how and why it works.
"""

from draftree.bench.inflate.drafter import inflate_drafter
from draftree.bench.inflate.model import inflate, places_of
from draftree.bench.inflate.sizes import Size

__all__ = ["Size", "inflate", "inflate_drafter", "places_of"]
