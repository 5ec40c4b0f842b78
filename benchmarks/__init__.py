"""Experiments on draftree: what the papers' tables and figures show, measured here, and more.

They lie beside the package and are not in its wheel. `draftree bench list` names them, `draftree bench run NAME` makes
one; `docs/developer/experiments.md` tells what is here and how one more is added.
"""
