"""The walls of the design, held by reading the sources: floors, drafters apart, short files, public names."""

import ast
import re
from pathlib import Path

import pytest

import draftree

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "draftree"
MODULES = sorted(SRC.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))

# A room may import rooms of its own floor and of lower floors. A new room gets its floor here and in
# docs/developer/design.md.
FLOORS = {
    "errors": 0,
    "demo_model": 0,
    "models": 0,
    "prompts": 0,
    "progress": 0,
    "tree": 0,
    "host": 1,
    "drafting": 2,
    "shaping": 2,
    "pruning": 2,
    "acceptance": 2,
    "engine": 3,
    "training": 4,
    "tuning": 4,
    "bench": 4,
    "showcase": 4,
    "serve": 4,
    "trace": 4,
    "integrations": 4,
    "__init__": 4,  # the public face: it names what all the floors below the command line offer
    "cli": 5,
    "__main__": 5,
}

# Each is a module or a package under drafting/. They share what else is there, and never know each other.
DRAFTERS = {
    "lookahead",
    "prompt_lookup",
    "jacobi",
    "bild",
    "draft_model",
    "self_speculative",
    "medusa",
    "bita",
    "hidden_transfer",
    "merge",
}


def name_of(path: Path) -> tuple[str, ...]:
    """The module's name as parts below draftree: host/cache.py is ("host", "cache")."""
    parts = path.relative_to(SRC).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts


def imports_of(source: str, module: tuple[str, ...], is_package: bool) -> set[tuple[str, ...]]:
    """Everything of draftree that a module imports, at any depth of its code and also for types alone."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module.split(".") if node.module else []
            if node.level:  # relative: climb from the package that holds the module
                package = ("draftree", *(module if is_package else module[:-1]))
                base = [*package[: len(package) - node.level + 1], *base]
            names = [".".join([*base, alias.name]) for alias in node.names]
        else:
            continue
        for name in names:
            top, *rest = name.split(".")
            if top == "draftree":
                # `import draftree` and names of its __init__ mean the public face.
                known = rest and (rest[0] in FLOORS or (SRC / rest[0]).is_dir())
                found.add(tuple(rest) if known else ("__init__",))
    return found


def test_imports_of_understands_every_spelling():
    source = """
import draftree
import draftree.engine.loop
from draftree.tree import TokenTree
from draftree import host
from .cache import SlotCache
from ..drafting import lookahead
def late():
    from ..cli import main
"""
    assert imports_of(source, ("host", "hooked"), is_package=False) == {
        ("__init__",),
        ("engine", "loop"),
        ("tree", "TokenTree"),
        ("host",),
        ("host", "cache", "SlotCache"),
        ("drafting", "lookahead"),
        ("cli", "main"),
    }
    assert imports_of("from .a import b", ("host",), is_package=True) == {("host", "a", "b")}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SRC)))
def test_lower_floors_never_import_higher_ones(path):
    module = name_of(path)
    assert module[0] in FLOORS, f"{module[0]} has no floor: give it one in {Path(__file__).name}"
    for imported in imports_of(path.read_text(encoding="utf-8"), module, path.name == "__init__.py"):
        assert FLOORS[imported[0]] <= FLOORS[module[0]], f"{'.'.join(module)} imports {'.'.join(imported)}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SRC)))
def test_drafters_do_not_know_each_other(path):
    module = name_of(path)
    if module[0] != "drafting" or len(module) == 1:
        return
    others = DRAFTERS - {module[1]}
    for imported in imports_of(path.read_text(encoding="utf-8"), module, path.name == "__init__.py"):
        assert imported[:1] != ("drafting",) or not others & set(imported[1:2]), ".".join(imported)


@pytest.mark.parametrize("path", MODULES + TESTS + BENCHMARKS, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_say_what_they_are_and_stay_short(path):
    source = path.read_text(encoding="utf-8")
    if source.strip():
        assert ast.get_docstring(ast.parse(source)), "open the file with a paragraph: what it does and why"
    assert source.count("\n") <= 400, "past 400 lines a file is asking to be two"


def test_public_names_are_documented():
    listed = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.M))
    assert listed == set(draftree.__all__), "the table in docs/api.md names what draftree.__all__ names"
    for name in draftree.__all__:
        assert (getattr(draftree, name).__doc__ or "").strip(), f"draftree.{name} has no docstring"


def test_design_page_shows_every_room():
    page = (ROOT / "docs" / "developer" / "design.md").read_text(encoding="utf-8")
    for path in SRC.iterdir():
        if path.is_dir() and any(path.glob("*.py")):
            assert f"`{path.name}`" in page, f"docs/developer/design.md does not tell of {path.name}"
