"""The import graph of the package: no circle, no import of a higher floor, no drafter that knows another.

Every import counts: at the top of a file, inside a function, and those made for types alone.
"""

from __future__ import annotations

import ast
from pathlib import Path

from every_file import of_every, tree_of

SRC = Path(__file__).parents[2] / "src" / "draftree"

# A room may import rooms of its own floor and of lower ones. A new room gets its floor here and in the design page.
FLOORS = {
    "errors": 0,
    "files": 0,
    "demo_model": 0,
    "checkpoints": 0,
    "detokenizer": 0,
    "prompts": 0,
    "encoding": 0,
    "pages": 0,
    "native": 0,  # the C library and its loader: trees, the trie and the CPU runner all read it
    "tree": 0,
    "runner": 1,
    "grammar": 1,
    "published": 0,
    "registry": 2,
    "by_name": 2,
    "tuned": 2,
    "drafting": 2,
    "gguf": 2,
    "shaping": 2,
    "pruning": 2,
    "acceptance": 2,
    "engine": 3,
    "training": 4,
    "tuning": 4,
    "bench": 4,
    "serve": 4,
    "trace": 4,
    "models": 4,
    "showcase": 4,
    "integrations": 4,
    "": 4,  # the public face: it names what all floors below the command line offer
    "chat": 4,
    "cli": 5,
    "__main__": 5,
}

# Each is a module or a package under drafting/. They share what else is there, and never know each other.
DRAFTERS = {
    "lookahead",
    "prompt_lookup",
    "bild",
    "draft_model",
    "medusa",
    "bita",
    "hidden_transfer",
    "merge",
}


def modules() -> dict[str, Path]:
    found = {}
    for path in SRC.rglob("*.py"):
        parts = ("draftree", *path.relative_to(SRC).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports_of(name: str, source: str) -> set[str]:
    """The modules of the package that a module imports, as far down as a name means a module."""
    package = name if MODULES.get(name, Path()).name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for imported in names:
            if imported.split(".")[0] == "draftree":
                while imported not in MODULES:
                    imported = imported.rpartition(".")[0]
                if imported != name:
                    found.add(imported)
    return found


GRAPH = {name: imports_of(name, path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Sets of names that reach each other: Tarjan's strongly connected components of more than one."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        number[name] = lowest[name] = len(number)
        stack.append(name)
        for imported in graph[name]:
            if imported not in number:
                visit(imported)
                lowest[name] = min(lowest[name], lowest[imported])
            elif imported in stack:
                lowest[name] = min(lowest[name], number[imported])
        if lowest[name] == number[name]:
            component = set()
            while name not in component:
                component.add(stack.pop())
            if len(component) > 1:
                found.append(component)

    for name in sorted(graph):
        if name not in number:
            visit(name)
    return found


def test_files_do_not_import_in_circles() -> None:
    found = circles(GRAPH)
    assert not found, f"these files import each other: {[sorted(circle) for circle in found]}"


def room(module: str) -> str:
    return module.partition(".")[2].partition(".")[0]


def test_rooms_do_not_import_in_circles() -> None:
    graph: dict[str, set[str]] = {room(name): set() for name in MODULES}
    for name, imported in GRAPH.items():
        graph[room(name)] |= {room(one) for one in imported} - {"", room(name)}
    found = circles(graph)
    assert not found, f"these rooms import each other: {[sorted(circle) for circle in found]}"


def test_folders_of_a_room_do_not_import_in_circles() -> None:
    """What a file of the room itself imports is no import of a folder: such files bind the folders together."""

    def folder(module: str) -> str:
        parts = module.split(".")[:3]
        return ".".join(parts) if (SRC.parent / Path(*parts)).is_dir() and len(parts) == 3 else ""

    graph: dict[str, set[str]] = {folder(name): set() for name in MODULES if folder(name)}
    for name, imported in GRAPH.items():
        if folder(name):
            graph[folder(name)] |= {folder(one) for one in imported} - {"", folder(name)}
    found = circles(graph)
    assert not found, f"these folders import each other: {[sorted(circle) for circle in found]}"


def test_lower_floors_never_import_higher_ones() -> None:
    for name in MODULES:
        assert room(name) in FLOORS, f"{room(name)} has no floor: give it one in {Path(__file__).name}"
    wrong = [(a, b) for a in MODULES for b in GRAPH[a] if FLOORS[room(b)] > FLOORS[room(a)]]
    assert not wrong, "\n".join(f"{name} imports {imported}" for name, imported in wrong)


def test_drafters_do_not_know_each_other() -> None:
    def drafter(module: str) -> str:
        return next((name for name in DRAFTERS if f"{module}.".startswith(f"draftree.drafting.{name}.")), "")

    inside = [module for module in MODULES if module.startswith("draftree.drafting.")]  # what they share is held too
    wrong = [(a, b) for a in inside for b in GRAPH[a] if drafter(b) not in ("", drafter(a))]
    assert not wrong, "\n".join(f"{name} imports {imported}" for name, imported in wrong)


def test_every_spelling_of_an_import_is_understood() -> None:
    source = """
import draftree
import draftree.engine.loop
from draftree.tree import TokenTree
from draftree import runner
from .runner import HookedRunner
from ..kv import cache
def late():
    from draftree.runner.base import Runner
"""
    assert imports_of("draftree.runner.hooked.families", source) == {
        "draftree",
        "draftree.engine.loop",
        "draftree.tree",
        "draftree.runner",
        "draftree.runner.hooked.runner",
        "draftree.runner.kv.cache",
        "draftree.runner.base",
    }
    assert imports_of("draftree.runner", "from .plan import Plan") == {"draftree.runner.plan"}, "a package is its own"


@of_every(sorted(SRC.rglob("*.py")))
def test_constructors_take_at_most_eight_parameters(path: Path) -> None:
    """More is asking to be two objects."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ClassDef):
            for made in node.body:
                if isinstance(made, ast.FunctionDef) and made.name == "__init__":
                    count = len(made.args.args) - 1 + len(made.args.kwonlyargs)
                    assert count <= 8, f"{node.name} takes {count}"


@of_every(sorted(SRC.rglob("*.py")))
def test_objects_hold_at_most_twelve_attributes(path: Path) -> None:
    """More is asking to be two objects; records without a constructor of their own, such as options, may have more."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ClassDef) and any(getattr(made, "name", "") == "__init__" for made in node.body):
            held = {
                part.attr
                for part in ast.walk(node)
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
                if isinstance(part.value, ast.Name) and part.value.id == "self"
            }
            assert len(held) <= 12, f"{node.name} holds {', '.join(sorted(held))}"
