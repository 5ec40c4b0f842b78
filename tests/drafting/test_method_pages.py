"""Option tables of the methods' pages, held against the code: names, defaults, and limits that are really refused."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import draftree
from draftree.drafting.in_model import InModelDrafter
from draftree.drafting.lookahead.dict_trie import TrieOptions
from draftree.drafting.lookahead.trie import Trie

PAGES = Path(__file__).parents[2] / "docs" / "methods"
ROW = re.compile(r"^\| `(\w+)` \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$")
NOT_CHOSEN = {"self", "shapes", "steps"}  # shapes and steps come from the model, by `fresh(model)`
MORE = {"trie_options": Trie, "fields": TrieOptions, "options": InModelDrafter}  # whose options a `**` passes on


def tables():
    """By class, its rows: option, type, default, meaning."""
    found = {}
    for page in sorted(PAGES.glob("*.md")):
        rows = None
        for line in page.read_text(encoding="utf-8").splitlines():
            head = re.match(r"^\| option of `(\w+)` \| type \| default \| meaning \|$", line)
            if head:
                rows = found[head[1]] = []
            elif not line.startswith("|"):
                rows = None
            elif rows is not None and not line.startswith("|---"):
                row = ROW.match(line)
                assert row, f"{page.name}: {line}"
                rows.append(tuple(cell.strip() for cell in row.groups()))
            else:
                assert "option" not in line.split("|")[1], f"{page.name}: name the class in {line}"
    return found


TABLES = tables()


def options_of(cls):
    """Every option of a constructor: its default, or `Parameter.empty`."""
    found = {}
    for name, parameter in inspect.signature(cls.__init__).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            found |= {n: d for n, d in options_of(MORE[name]).items() if n not in found} if name in MORE else {}
        elif name not in NOT_CHOSEN:
            found[name] = parameter.default
    return found


def test_every_method_has_a_table():
    expected = {
        name
        for name in draftree.__all__
        if inspect.isclass(thing := getattr(draftree, name))
        and any(base.__name__ in ("Drafter", "Shape") for base in thing.__mro__[1:])
        and thing.__init__ is not object.__init__  # without options there is nothing to list
    }
    assert expected >= {"BiTA", "Fixed"}
    assert set(TABLES) >= expected | {"EarlyPruning", "LossyTypical"}


@pytest.mark.parametrize("name", TABLES)
def test_names_and_defaults_are_those_of_the_constructor(name):
    options = options_of(getattr(draftree, name))
    assert {row[0] for row in TABLES[name]} == set(options)
    for option, kind, default, meaning in TABLES[name]:
        assert kind, f"{option}: say its type"
        assert meaning, f"{option}: say what it means"
        if options[option] is inspect.Parameter.empty:
            assert not default, f"{option} has no default"
        else:
            assert ast.literal_eval(default.strip("`")) == options[option], option
        if kind.startswith(("integer", "number")):
            assert re.search(r"\d+ or more|over 0|\d+ to ", kind), f"{option}: {kind!r} names no limits"


def made(demo, name, **options):
    """One of the class with these options, everything else as it comes."""
    cls = getattr(draftree, name)
    if name in ("BiTA", "Medusa", "HiddenTransfer"):
        return cls.fresh(demo.model, **options)
    if name in ("BiLD", "DraftModel"):
        return cls(demo.model, **options)
    if name == "EarlyPruning":
        return cls(draftree.demo_early_head(demo.model), **options)
    if name == "Lookahead":  # with end tokens its trie is made at once
        return cls(**{"eos_token_ids": ()} | options)
    return cls(**({"node_budget": 4} if name == "Fixed" else {}) | options)


LIMITS = [
    (name, option, kind)
    for name, rows in TABLES.items()
    for option, kind, _, _ in rows
    if kind.startswith(("integer", "number"))
]


@pytest.mark.parametrize(("name", "option", "kind"), LIMITS)
def test_limits_are_refused_in_a_sentence(demo, name, option, kind):
    beyond = []
    if low := re.search(r"(\d+) (?:or more|to )", kind):
        made(demo, name, **{option: int(low[1])})
        beyond.append(int(low[1]) - 1)
    if high := re.search(r"to (\d+)|at most (\d+)", kind):
        beyond.append(int(high[1] or high[2]) + 1)
    if "over 0" in kind:
        beyond.append(0)
    if under := re.search(r"under (\d+)", kind.partition("(")[0]):
        beyond.append(int(under[1]))
    assert beyond
    for value in beyond:
        with pytest.raises(ValueError, match=option):
            made(demo, name, **{option: value})
