"""Inflation: a model made larger in memory without a change in what it says, and drafters that fit it.

`model` describes how and why it works.
"""

from benchmarks.inflate.drafter import inflate_drafter
from benchmarks.inflate.model import inflate, places_of
from benchmarks.inflate.sizes import Size

__all__ = ["Size", "inflate", "inflate_drafter", "places_of"]
