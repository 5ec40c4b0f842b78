"""The build of the compiled library with compilers that cannot do all of it."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# Writes down what it was told, and fails where the words `refused` do and NO_AMX is not among them.
COMPILER = """#!{python}
import sys
words = sys.argv[1:]
with open({log!r}, "a") as log:
    print(*words, file=log)
if {refused!r} in " ".join(words) and "-DNO_AMX" not in words:
    sys.exit("no such instruction")
open(words[words.index("-o") + 1], "w").close()
"""


def built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str, *, named: bool = True
) -> tuple[str | None, list[str]]:
    """What the build said, and the calls of a compiler that fails where `refused` is in what it is told.

    It is what CC names, or else all that lies on the path, by two names.
    """
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    hook: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    compiler.write_text(COMPILER.format(python=sys.executable, log=str(log), refused=refused))
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler) if named else "")
    if not named:
        (tmp_path / "bin").mkdir()
        for name in ("cc", "gcc"):
            shutil.copy(compiler, tmp_path / "bin" / name)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / hook.LIBRARY).parent.mkdir(parents=True)
    said = hook.compile_all(tmp_path)
    assert (tmp_path / hook.LIBRARY).exists() is (said is None)
    return said, log.read_text().splitlines()


def test_one_that_knows_all_is_called_once_for_a_file(tmp_path, monkeypatch):
    said, calls = built(tmp_path, monkeypatch, "nothing")
    assert said is None
    assert len(calls) == 6  # five files, and the library
    assert not any("NO_AMX" in call for call in calls)


def test_an_empty_name_is_none_and_the_first_compiler_of_several_is_taken(tmp_path, monkeypatch):
    said, calls = built(tmp_path, monkeypatch, "nothing", named=False)
    assert said is None
    assert len(calls) == 6
    assert not any("gcc" in call for call in calls)


def test_an_assembler_older_than_amx_builds_the_rest(tmp_path, monkeypatch):
    said, calls = built(tmp_path, monkeypatch, "kernels_avx512.c")
    assert said is None
    assert len(calls) == 7
    assert ["kernels_avx512.c" in call for call in calls if "NO_AMX" in call] == [True]
    assert "-shared" in calls[-1]


def test_one_that_fails_anyway_is_quoted(tmp_path, monkeypatch):
    said, _ = built(tmp_path, monkeypatch, "-shared")
    assert said is not None
    assert "no such instruction" in said


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
def test_the_layers_without_amx_compile(tmp_path):
    source = ROOT / "src/draftree/native/kernels_avx512.c"
    command = ["gcc", "-std=gnu99", "-fsyntax-only", "-DNO_AMX", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text = subprocess.run(["gcc", "-E", "-DNO_AMX", str(source)], capture_output=True, text=True, check=True).stdout
    assert "halves_amx" not in text
