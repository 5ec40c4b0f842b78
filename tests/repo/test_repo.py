"""The walls of the design, held by reading the sources: short files, tensors that name their type, public names."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
from every_file import of_every, tree_of

import draftree

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "draftree"
MODULES = sorted(SRC.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))

# Calls of torch that make a tensor out of nothing. Those of the first row make floats unless they are told otherwise.
FLOATS = {"zeros", "ones", "empty", "full", "eye", "rand", "randn", "linspace", "tensor", "as_tensor", "scalar_tensor"}
FACTORIES = FLOATS | {"arange", "randint", "randperm", "asarray", "logspace", "empty_strided", "range"}
LAYERS = {"Linear", "Embedding", "LayerNorm", "RMSNorm", "Conv1d"}
OLD_FACTORIES = {"Tensor", "FloatTensor", "LongTensor", "DoubleTensor", "BoolTensor"}  # they take torch's defaults

# Experiments set up their own process, and no settings of others are about.
NO_LIBRARY = {"bench"}
# These look at addresses of tensors, but hand none of them to C as something to read or write.
LOOK_AT_ADDRESSES = {"native/structures.py", "runner/cpu/runner.py"}


def name_of(path: Path) -> tuple[str, ...]:
    """The module's name as parts below draftree: runner/cache.py is ("runner", "cache")."""
    parts = path.relative_to(SRC).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts


@of_every(MODULES + TESTS + BENCHMARKS)
def test_files_say_what_they_are_and_stay_short(path):
    source = path.read_text(encoding="utf-8")
    if source.strip():
        assert ast.get_docstring(tree_of(path)), "open the file with a paragraph: what it does and why"
    assert source.count("\n") <= 400, "past 400 lines a file is asking to be two"


def unnamed(source: str) -> list[str]:
    """Calls that leave a new tensor's device, or its type where it could be a float, to torch's global settings."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        maker, owner = node.func.attr, ast.unparse(node.func.value)
        if owner == "torch" and maker in FACTORIES:
            needed = {"device", "dtype"} if maker in FLOATS else {"device"}
        elif owner in ("nn", "torch.nn") and maker in LAYERS:
            # Nothing is made on the meta device, so there is nothing to have a type.
            on_meta = any(k.arg == "device" and ast.unparse(k.value) == "'meta'" for k in node.keywords)
            needed = {"device"} if on_meta else {"device", "dtype"}
        elif owner == "torch" and maker in OLD_FACTORIES:
            needed = {"a function that takes dtype and device"}
        else:
            continue
        missing = needed - {keyword.arg for keyword in node.keywords}
        if missing:
            found.append(f"line {node.lineno}: torch's {maker} without {' and '.join(sorted(missing))}")
    return found


def test_unnamed_finds_every_kind():
    source = """
torch.zeros(3)
torch.zeros(3, dtype=torch.float32)
torch.arange(3)
torch.FloatTensor(3)
nn.Linear(3, 3)
torch.zeros(3, dtype=kind, device=device)
torch.arange(3, device=device)
nn.Linear(3, 3, device="meta")
x.new_zeros(3)
torch.zeros_like(x)
"""
    assert [line.split(":")[0] for line in unnamed(source)] == [f"line {n}" for n in range(2, 7)]


@of_every(MODULES)
def test_new_tensors_name_their_type_and_device(path):
    if name_of(path)[0] not in NO_LIBRARY:
        assert not unnamed(path.read_text(encoding="utf-8")), "torch's defaults belong to the user's other code"


@of_every(MODULES)
def test_addresses_for_compiled_code_come_from_one_place(path):
    source = path.read_text(encoding="utf-8")
    exempt = name_of(path)[0] in NO_LIBRARY or path.relative_to(SRC).as_posix() in LOOK_AT_ADDRESSES
    if exempt or not re.search(r"^(import|from) ctypes", source, re.M):
        return
    assert not re.search(r"\.data_ptr\(|\.ctypes\.data\b", source), "draftree.native checks what C is handed"


def test_public_names_are_documented():
    listed = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.M))
    assert listed == set(draftree.__all__), "the table in docs/api.md names what draftree.__all__ names"
    for name in draftree.__all__:
        assert (getattr(draftree, name).__doc__ or "").strip(), f"draftree.{name} has no docstring"


def test_design_page_shows_every_room():
    page = (ROOT / "docs" / "developer" / "design.md").read_text(encoding="utf-8")
    for path in SRC.iterdir():
        if (path.suffix == ".py" and path.stem[0] != "_") or (path.is_dir() and any(path.glob("*.py"))):
            assert f"`{path.stem}`" in page, f"docs/developer/design.md does not tell of {path.stem}"


def test_checks_before_a_commit_are_those_of_the_dev_extra():
    pins = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"][
        "dev"
    ]
    versions = dict(pin.split("==") for pin in pins if "==" in pin)
    config = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert re.search(r"ruff-pre-commit\s+rev: v(\S+)", config)[1] == versions["ruff"]
    lint = re.search(r"^\t\$\(BIN\)/(mypy.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)[1]
    assert f"entry: .venv/bin/{lint}\n" in config, "the command of make lint, and the mypy that the dev extra installed"
    assert versions["mypy"]


def test_the_version_has_a_section_in_the_changelog():
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## \[(\S+)\]", changes, re.M)[1] == draftree.__version__


def test_pages_of_the_docs_stay_as_wide_as_a_telephone():
    """Tables scroll in boxes of their own, and code and options show whole; looked at at 400 and 1280 pixels."""
    settings = (ROOT / "docs" / "conf.py").read_text(encoding="utf-8")
    rules = (ROOT / "docs" / "_static" / "narrow.css").read_text(encoding="utf-8")
    assert 'html_css_files = ["narrow.css"]' in settings
    assert ".table-wrapper, div.highlight pre { overflow-x: auto; }" in rules
    assert ".highlight-python pre, .highlight-sh pre { white-space: pre-wrap; overflow-wrap: anywhere; }" in rules


def test_a_check_of_every_file_names_those_that_fail():
    @of_every([Path("good.py"), Path("bad.py"), Path("worse.py")])
    def check(path):
        assert path.name == "good.py", "it is not good"

    with pytest.raises(AssertionError) as failed:
        check()
    told = [line for line in str(failed.value).splitlines() if "it is not good" in line]
    assert [line.rpartition(": ")[0].split()[-1] for line in told] == ["bad.py", "worse.py"]
