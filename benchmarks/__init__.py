"""Experiments on draftree: the tables and figures of the papers, other engines, and the parts of draftree.

They are beside the package and not in its wheel. `draftree bench list` names them, `draftree bench run NAME` runs one,
and `docs/developer/experiments.md` describes them. `inflate` makes a model larger with the same text, `compare` is
`draftree bench compare`, and `report` makes the documentation's tables from result files.
"""
