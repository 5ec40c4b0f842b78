"""Experiments on draftree: what the papers' tables and figures show, measured here, and more.

They lie next to the package and are not in its wheel. `draftree bench list` names them, `draftree bench run NAME` runs
one; `docs/developer/experiments.md` describes what is here and how one more is added. `inflate` makes a model larger
without a change in what it says, `report` makes the documentation's tables from result files, and `agree` compares two.
"""
