"""The command line before any work: blocks of options, files and folders that cannot be used, Ctrl-C, completion."""

from __future__ import annotations

import copy
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

import draftree
from draftree.cli import app, main, screen
from draftree.cli.options import complete_drafter, grouped
from draftree.models import encode_prompt, load_model
from draftree.registry import DRAFTERS


@dataclass(frozen=True)
class Block:
    """Two options."""

    first: Annotated[int, typer.Option(min=1, help="The first.")] = 3
    second: Annotated[str | None, typer.Option("--other", help="The second.")] = None


def test_a_block_becomes_options_in_its_place_and_arrives_as_one() -> None:
    got: list[Any] = []

    @grouped
    def verb(
        name: Annotated[str, typer.Argument()],
        *,
        before: Annotated[int, typer.Option()] = 1,
        block: Block,
        after: Annotated[bool, typer.Option("--after")] = False,
    ) -> None:
        """A verb."""
        got.append((name, before, block, after))

    small = typer.Typer()
    small.command()(verb)
    told = CliRunner().invoke(small, ["--help"]).output
    places = [told.index(word) for word in ("--before", "--first", "--other", "--after")]
    assert places == sorted(places)
    assert CliRunner().invoke(small, ["n", "--other", "x", "--after"]).exit_code == 0
    assert CliRunner().invoke(small, ["n", "--first", "5"]).exit_code == 0
    assert CliRunner().invoke(small, ["n", "--first", "0"]).exit_code == 2
    assert got == [("n", 1, Block(3, "x"), True), ("n", 1, Block(5, None), False)]


def test_a_model_is_the_first_argument_or_an_option(demo: Any, tmp_path: Path, refused: Any) -> None:
    """Of the verbs with prompts too: the first of two arguments, or the only one beside a file of prompts."""
    folder, file, out = tmp_path / "model", tmp_path / "p.jsonl", tmp_path / "run.jsonl"
    demo.model.save_pretrained(folder)
    demo.tokenizer.save_pretrained(folder)
    file.write_text(json.dumps({"prompt": "hello"}))
    few = ["--max-new-tokens", "3", "--out", str(out)]
    for arguments in (["hello"], ["-m", str(folder), "hello"], [str(folder), "hello"]):
        assert CliRunner().invoke(app, ["generate", *few[:2], *arguments]).exit_code == 0, arguments
        done = CliRunner().invoke(app, ["trace", *few, *arguments, "again"])
        assert done.exit_code == 0, done.output
        assert len(draftree.read_trace(out).requests) == 2, arguments
    done = CliRunner().invoke(app, ["generate", str(folder), "--prompts", str(file)])
    assert json.loads(done.output)["prompt"] == "hello"
    refused(["generate", str(folder), "--model", str(folder), "hello"], "The model is given twice")
    refused(["chat", str(folder), "-m", "other"], "The model is given twice")
    refused(["generate", str(folder)], "Give a prompt, or --prompts")


def test_a_system_message_reaches_the_template(demo: Any, refused: Any) -> None:
    few = ["generate", "--json", "--max-new-tokens", "8", "Name three colours."]
    told, plain = (json.loads(CliRunner().invoke(app, few + more).output) for more in (["--system", "Be brief."], []))
    ids = encode_prompt(demo.tokenizer, few[-1], system="Be brief.")
    expected = draftree.generate(demo.model, torch.tensor([ids]), max_new_tokens=8).sequences[0, len(ids) :]
    assert told["token_ids"] == expected.tolist() != plain["token_ids"]
    refused([*few, "--system", "x", "--raw"], "leave one out")
    strict = copy.deepcopy(demo.tokenizer)
    strict.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(ValueError, match=r"refuses these messages: System role not supported\."):
        encode_prompt(strict, "hi", system="Be brief.")
    strict.chat_template = None
    with pytest.raises(ValueError, match="no chat template, which a system message needs"):
        encode_prompt(strict, "hi", system="Be brief.")


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """A folder without anything in it, a file, a folder that is missing, and a folder with a model and no tokenizer."""
    empty, file, bare = tmp_path / "empty", tmp_path / "file", tmp_path / "bare"
    empty.mkdir()
    bare.mkdir()
    file.write_text("no model\n")
    file.with_suffix(".json").write_text("no model\n")
    (bare / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return {"EMPTY": str(empty), "FILE": str(file), "GONE": str(tmp_path / "gone" / "x"), "BARE": str(bare)}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("generate hi --model EMPTY", "has no config.json: give one that a model was saved into"),
        ("generate hi --model FILE", "There is no model folder"),
        ("generate hi --model BARE", "save the model's tokenizer there too"),
        ("generate hi --drafter=", "There is no drafter ''"),
        ("generate hi --drafter lookahead+", "joins a name and nothing"),
        ("generate hi --drafter lookahead+FILE.json", "merges a tuned choice, which has its own trees: give it alone"),
        ("generate hi --trie EMPTY", "which is a folder: name a file"),
        ("generate hi --trie GONE", "There is no folder"),
        ("generate hi --sample --temperature 0", "--temperature is 0: give a number over 0, or leave --sample out"),
        ("generate --prompts FILE --out FILE", "file', the file of --prompts: name another file"),
        ("trace hi --trie FILE --out FILE", "file', the file of --trie"),
        ("trace hi --out x --html x", "--out is 'x', the file of --html"),
        ("trace --replay FILE --html FILE", "file', the file of --replay"),
        ("tune --prompts FILE.json --out FILE.json", "the file of --prompts"),
        ("trace hi --out EMPTY", "--out is"),
        ("trace hi --html GONE", "There is no folder"),
        ("trace --replay GONE", "There is no recorded run"),
        ("tune --column answer", "--column names a field of the rows of --prompts"),
        ("tune --out FILE/x.json", "is a file: name a folder"),
        ("bench quick --out FILE", "is a file: name a folder"),
        ("bench quick --prompts EMPTY", "holds no .jsonl file"),
        ("train data FILE --out x", "is not JSON"),
        ("train medusa --data EMPTY --out FILE/x", "is a file: name a folder"),
        ("train medusa --data EMPTY --out EMPTY --seed -1", "seed is -1: give at least 0"),
        ("train align --small BARE --data EMPTY --out BARE", "holds a model or drafter that no training"),
    ],
)
def test_what_cannot_be_used_is_told_before_any_work(
    arguments: str,
    told: str,
    places: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: Any,
) -> None:
    if "train" in arguments:
        pytest.importorskip("accelerate")
    for name, path in places.items():
        arguments = arguments.replace(name, path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    refused(arguments.split(), told)
    assert sorted(tmp_path.rglob("*")) == before, "nothing is made for a command that does not run"


def test_errors_of_files_name_the_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device", "answers.jsonl")

    monkeypatch.setattr("draftree.cli.app", full)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "draftree: 'answers.jsonl' cannot be used: No space left on device.\n"


def test_weights_that_are_cut_off_are_one_sentence(demo: Any, tmp_path: Path) -> None:
    demo.model.save_pretrained(tmp_path)
    demo.tokenizer.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    with pytest.raises(ValueError, match=r"weights of .* cannot be read \(.*\): copy or download") as raised:
        load_model(str(tmp_path))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("[enforce fail] can't allocate memory: 9 bytes."), torch.OutOfMemoryError("CUDA out of memory.")],
)
def test_memory_that_is_full_is_one_sentence(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("draftree.models.load_model", fails)
    monkeypatch.setattr(sys, "argv", ["draftree", "generate", "hello"])
    with pytest.raises(SystemExit, match="2"):
        main()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"draftree: There is not enough memory ({str(error).rstrip('.')}): close")
    error.args = ("something else",)
    with pytest.raises(RuntimeError, match="something else"):
        main()


def test_version() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output.strip()) == (0, draftree.__version__)


def test_completion_knows_drafters_also_behind_a_plus() -> None:
    assert complete_drafter("") == list(DRAFTERS)
    assert complete_drafter("lookahead+me") == ["lookahead+medusa"]
    environment = os.environ | {
        "_DRAFTREE_COMPLETE": "complete_bash",
        "COMP_WORDS": "draftree generate --drafter prompt",
        "COMP_CWORD": "3",
    }
    code = "import sys; sys.argv = ['draftree']; from draftree.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["prompt-lookup"]


def test_what_is_stopped_tells_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for about, words in (
        (screen.StageBar(screen.wide_console()), "nothing was written"),
        (screen.DataBar(screen.line_console(), "answers are kept"), "answers are kept"),
        (screen.resumable(tmp_path), "--resume goes on from the last one"),
    ):
        with pytest.raises(KeyboardInterrupt), about:  # type: ignore[attr-defined]
            raise KeyboardInterrupt
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("draftree: stopped; ")
        assert words in said.err


def test_a_bar_shows_what_is_done_how_long_it_took_and_what_is_left() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, _environ={})
    with screen.StageBar(console) as bar:
        bar.stage("measuring", 4)
        bar.step()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert re.search(r"measuring [━╸╺ ]+ 1/4 \d:\d\d:\d\d elapsed, (\d:\d\d|-):\S+ left", shown), shown


COMMANDS = (
    ("demo", "--drafter", "lookahaed"),
    ("generate", "--drafter", "lookahaed", "hello"),
    ("generate", "--temperature", "2", "hello"),
    ("generate", "--trie", "trie", "--drafter", "medusa", "hello"),
    ("generate", "--regex", "a", "--choice", "b", "hello"),
    ("generate",),
    ("chat", "--drafter", "lookahaed"),
    ("serve", "--drafter", "lookahaed"),
    ("trace", "hello", "--drafter", "lookahaed"),
    ("train", "data", "no-such.jsonl", "--out", "answers"),
    ("generate", "--prompts", "no-such.jsonl"),
    ("generate", "--json-schema", "no-such.json", "hello"),
    ("generate", "--runner", "loup", "hello"),
    ("generate", "no-such-model", "hello"),
    ("chat", "no-such-model"),
    ("demo", "-m", "no-such-model"),
    ("serve", "./no-such-model"),
    ("tune", "./no-such-model"),
    ("train", "medusa", "./no-such-model", "--data", "d", "--out", "o"),
    ("trace", "--replay", "no-such.jsonl"),
    ("bench", "quick", "--prompts", "no-such.jsonl"),
    ("generate", "page.gguf", "hi"),
)
REFUSES = """
import sys
from draftree.cli import main

for line in sys.stdin.read().splitlines():
    sys.argv = ["draftree", *line.split("\\t")]
    try:
        main()
    except SystemExit as end:
        print(line.replace("\\t", " "), end.code, sorted({"torch", "transformers"} & set(sys.modules)))
"""


def test_options_that_do_not_fit_are_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "page.gguf").write_text("<!doctype html>")
    lines = "\n".join("\t".join(command) for command in COMMANDS)
    done = subprocess.run(
        [sys.executable, "-c", REFUSES], input=lines, capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout.splitlines() == [f"{' '.join(command)} 2 []" for command in COMMANDS], done.stderr


def test_warnings_are_sentences_without_lines_of_source() -> None:
    code = "import warnings; from draftree import cli; cli.app = lambda: warnings.warn('Say this.'); cli.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "Say this.\n"
