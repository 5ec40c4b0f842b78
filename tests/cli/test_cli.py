"""The command line: every verb once, equal ids, JSON that parses, no escape codes in a pipe, one-sentence errors."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from few import few
from forked import Done, forked
from typer.testing import CliRunner

from draftree import showcase
from draftree.bench.measure import Difference
from draftree.bench.methods import Answer, Draftree, HuggingFace
from draftree.by_name import make_drafter
from draftree.cli import app
from draftree.cli.demo_view import View
from draftree.cli.screen import ColouredText
from draftree.models import encode_prompt
from draftree.pages import colour_of

DOCS = Path(__file__).parents[2] / "docs"


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def short_demo(monkeypatch):
    """Two kinds are enough to see the demo work."""
    monkeypatch.setattr(showcase, "KINDS", {"tldr_shell": "shell", "wikisql": "SQL"})


@pytest.mark.parametrize("drafter", ["lookahead", "prompt-lookup", "draft-model", "none"])
def test_demo_answers_are_those_of_hugging_face(short_demo, demo, drafter):
    made = make_drafter(drafter, demo.tokenizer, demo.model)
    scenes = list(showcase.side_by_side(*demo, made, showcase.embedded_questions(), 10, reference=True))
    assert [scene.question.kind for scene in scenes] == ["shell", "SQL"]
    for scene in scenes:
        ids = torch.tensor([encode_prompt(demo.tokenizer, scene.question.text)])
        mask = torch.ones_like(ids)
        expected = demo.model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False)
        assert scene.drafted.ids == expected[0, ids.shape[1] :].tolist()
    total = showcase.figures("total", scenes)
    assert total["equal"] is True
    assert total["tokens"] == sum(len(scene.drafted.ids) for scene in scenes)
    if drafter == "none":
        assert total["acceptance_length"] == 1


def test_demo_in_a_pipe_is_plain_text(short_demo):
    done = run("demo", "--max-new-tokens", "8")
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.output
    assert "All answers are equal" in done.output
    assert done.output.rstrip().splitlines()[-3].startswith("Next: draftree try")


def test_demo_fails_and_names_the_place_where_answers_part(short_demo, monkeypatch):
    honest = showcase._race

    def wrong(*given):
        plain, drafted = honest(*given)
        ids = [*drafted.ids[:3], drafted.ids[3] + 1, *drafted.ids[4:]]
        return plain, Answer(ids, drafted.seconds, drafted.stats)

    monkeypatch.setattr(showcase, "_race", wrong)
    done = run("demo", "--max-new-tokens", "8")
    assert done.exit_code == 1
    assert "ANSWERS DIFFER" in done.output
    assert "shell: the drafted answer first differs at new token 3" in done.output
    assert "top-2 logit gap" in done.output


def test_try_holds_a_dialogue_and_ends_with_one_sentence(demo):
    done = run("try", "--max-new-tokens", "8")
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.output
    assert [line[:6] for line in done.output.splitlines() if line.startswith("turn ")] == ["turn 1", "turn 2", "turn 3"]
    assert re.search(r"^The same \d+ tokens.*\.$", done.output.rstrip().splitlines()[-1])
    asked = run("try", "embedded", "List all files.", "--max-new-tokens", "8", "--drafter", "medusa")
    assert asked.exit_code == 0, asked.output
    assert "turn 1: List all files.\n" in asked.output
    assert "medusa: 8 tokens in" in asked.output


def test_try_answers_each_turn_like_hugging_face(demo):
    turns, history = showcase.three_turns("List all files."), []
    for scene in showcase.side_by_side(*demo, make_drafter("lookahead", None, None), turns, 10):
        ids = torch.tensor([encode_prompt(demo.tokenizer, scene.question.text, history=history)])
        mask = torch.ones_like(ids)
        expected = demo.model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False)
        assert scene.plain.ids == scene.drafted.ids == expected[0, ids.shape[1] :].tolist()
        assert scene.plain.stats.steps == len(scene.plain.ids)
        history.append((scene.question.text, demo.tokenizer.decode(scene.plain.ids, skip_special_tokens=True)))
    assert len(history) == 3


@pytest.mark.parametrize(
    ("plain", "drafted", "differs", "said"),
    [
        (2.9, 1.0, False, "The same 4 tokens, 2.9 times as fast."),
        (1.0, 1.01, False, "The same 4 tokens, 1.0 times as fast: on this text drafting does not pay."),
        (1.0, 1.25, False, "The same 4 tokens, 0.8 times as fast: on this text drafting does not pay."),
        (3.0, 1.0, True, "The texts DIFFER (where: below); lookahead was 3.0 times as fast."),
    ],
)
def test_try_says_what_was_measured(demo, capsys, plain, drafted, differs, said):
    differences = {"drafted": Difference(0, 1, 2, 0.1)} if differs else {}
    answers = Answer([1, 2, 3, 4], plain), Answer([1, 2, 3, 4], drafted)
    View(demo.tokenizer, "lookahead").verdict([showcase.Scene(showcase.Question("", ""), *answers, None, differences)])
    assert capsys.readouterr().out.strip() == said


def test_demo_counts_only_the_engine_and_not_the_display(demo):
    method = Draftree("plain", demo.model, 6)
    ids = encode_prompt(demo.tokenizer, "Write a shell command using ls: List all files.")
    method.answer(ids)
    seen = []

    def slow_display(request):
        seen.append(len(request.output))
        subprocess.run([sys.executable, "-S", "-c", "import time; time.sleep(0.3)"], check=True)

    assert method.answer(ids, slow_display).seconds < 0.3 * len(seen)
    assert seen == sorted(seen)


def test_methods_give_what_hugging_face_gives(demo):
    ids = encode_prompt(demo.tokenizer, "Describe the restaurant: name[Aromi], food[French], area[riverside]")
    reference = HuggingFace("hf", demo.model, 12).answer(ids)
    ours = Draftree("plain", demo.model, 12, runner="hooked").answer(ids)
    assert ours.ids == reference.ids
    assert reference.stats is None
    assert ours.stats.emitted == len(ours.ids)


def test_generate_merges_drafters() -> None:
    answer = ["generate", "--json", "--max-new-tokens", "48", "List the numbers from one to twenty, twice."]
    plain = json.loads(CliRunner().invoke(app, [*answer, "--drafter", "none"]).output)
    merged = json.loads(CliRunner().invoke(app, [*answer, "--drafter", "lookahead+medusa"]).output)
    assert merged["token_ids"] == plain["token_ids"]
    assert set(merged["stats"]["accepted_by_source"]) <= {"lookahead", "medusa", "lookahead+medusa"}
    for name, words in (("lookahead+medussa", "Did you mean 'medusa'?"), ("lookahead+none", "leave 'none' out")):
        done = CliRunner().invoke(app, [*answer, "--drafter", name])
        assert words in str(done.exception)


def test_generate_prunes_inside_the_pass() -> None:
    answer = ["generate", "--json", "--max-new-tokens", "24", "--drafter", "medusa", "Write a Python function."]
    plain, pruned = (
        json.loads(CliRunner().invoke(app, [*answer, *more]).output) for more in ([], ["--early-head", "demo"])
    )
    assert pruned["token_ids"] == plain["token_ids"]
    assert "pruned" in pruned["stats"]
    for more, words in (
        (["--early-head", "nowhere"], "nowhere"),
        (["--early-head", "demo", "--drafter", "none"], "name a drafter"),
    ):
        done = CliRunner().invoke(app, [*answer, *more])
        assert done.exit_code != 0
        assert words in str(done.exception)


@pytest.mark.parametrize("way", few(["fork", "process"], ["fork"]))
def test_generate_streams_in_a_pipe_without_escape_codes(way, monkeypatch):
    arguments = ["generate", "--max-new-tokens", "12", "--stats", "List all files."]
    if way == "fork":
        monkeypatch.setattr(sys, "argv", ["draftree", *arguments])
        done = forked(lambda: runpy.run_module("draftree", run_name="__main__"))
    else:
        command = [sys.executable, "-m", "draftree", *arguments]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
        done = Done(ran.returncode, ran.stdout, ran.stderr)
    assert done.status == 0, done.err
    assert "\x1b" not in done.out
    assert "acceptance length" in done.out
    assert "Traceback" not in done.err


def test_generate_json_tells_ids_and_sources_of_equal_length():
    done = run("generate", "--max-new-tokens", "12", "--json", "Write a shell command using ls: List all files.")
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    assert len(told["token_ids"]) == len(told["sources"]) == told["stats"]["emitted"]
    assert told["stats"]["accepted"] == sum(source is not None for source in told["sources"])


def test_generate_reads_standard_input_and_keeps_its_trie(tmp_path):
    trie = tmp_path / "kept.trie"
    arguments = ["generate", "--max-new-tokens", "12", "--json", "--trie", str(trie), "-"]
    first = CliRunner().invoke(app, arguments, input="Write a shell command using ls: List all files.")
    second = CliRunner().invoke(app, arguments, input="Write a shell command using ls: List all files.")
    assert first.exit_code == second.exit_code == 0, second.output
    one, two = json.loads(first.output), json.loads(second.output)
    assert one["token_ids"] == two["token_ids"]
    assert (
        "lookahead/output" in two["stats"]["accepted_by_source"]
        or "lookahead/both" in two["stats"]["accepted_by_source"]
    )


def test_generate_answers_a_file_of_prompts(tmp_path):
    """As many at a time as there are slots; each answer is the one that its prompt gets alone."""
    texts = [
        "Tell me about the sea.",
        "Write a shell command using ls: List all files.",
        "Tell me about the sea.",
        "Hi",
    ]
    rows = [{"prompt": text, "id": f"row {i}"} for i, text in enumerate(texts)]
    file, out = tmp_path / "p.jsonl", tmp_path / "answers.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    options = ["--max-new-tokens", "16", "--sample", "--seed", "3"]
    done = run("generate", "--prompts", str(file), "--slots", "2", "--out", str(out), "--stats", "--json", *options)
    assert done.exit_code == 0, done.output
    assert "4 requests" in done.output
    told = [json.loads(line) for line in out.read_text().splitlines()]
    assert [one["id"] for one in told] == [row["id"] for row in rows]
    for i, one in enumerate(told):
        alone = run("generate", "--json", *options[:-1], str(3 + i), texts[i])
        assert one["token_ids"] == json.loads(alone.output)["token_ids"]
        assert one["prompt"] == texts[i]
    printed = run("generate", "--prompts", str(file), "--max-new-tokens", "4")
    assert [json.loads(line)["id"] for line in printed.output.splitlines()] == [row["id"] for row in rows]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["generate"], "Give a prompt, or --prompts and a file of them"),
        (["generate", "--prompts", "p.jsonl", "embedded", "hello"], "Give a prompt, or --prompts and a file of them"),
        (["generate", "--out", "x.jsonl", "hello"], "--out has no effect without --prompts"),
        (["generate", "--slots", "4", "hello"], "--slots has no effect without --prompts"),
        (["generate", "--prompts", "nowhere.jsonl"], "There is no prompts file 'nowhere.jsonl'"),
        (["generate", "--prompts", "p.jsonl", "--stats"], "--stats would mix with the answers"),
        (["try", "--drafter", "lokahead"], "Did you mean 'lookahead'?"),
        (["try", "./no-such-folder"], "no model folder './no-such-folder'"),
        (["demo", "--drafter", "lokahead"], "Did you mean 'lookahead'?"),
        (["generate", "--trie", "x.trie", "--drafter", "none", "hello"], "--trie belongs to the lookahead drafter"),
        (["generate", " "], "The prompt is empty"),
        (["generate", "--top-k", "5", "hello"], "--top-k has no effect without --sample"),
        (["generate", "--temperature", "0.5", "hello"], "--temperature has no effect without --sample"),
        (["generate", "--model", "./no-such-folder", "hello"], "no model folder './no-such-folder'"),
        (["generate", "--runner", "loup", "hello"], "'hooked', 'eager', 'cpu', 'cuda_graphs' or 'in_place'"),
        (
            ["generate", "--no-pack", "--runner", "cpu", "hello"],
            "leaves the weights as they are, and --runner cpu copies",
        ),
        (["generate", "--bild", "demo", "--drafter", "none", "hello"], "leave --drafter out"),
        (["generate", "--bild", "demo", "--fallback-threshold", "1.5", "hello"], "fallback_threshold is 1.5: give"),
        (["generate", "--rollback-threshold", "3", "hello"], "--rollback-threshold belongs to --bild"),
        (["generate", "--lossless", "hello"], "--lossless belongs to --bild"),
        (["generate", "--bild", "nowhere", "hello"], "There is no small model 'nowhere'"),
        (["generate", "--bild", "demo", "--strict", "hello"], "which BiLD changes"),
        (["generate", "--jsn"], "--json"),
        (["dmo"], "demo"),
        (["bench", "quik"], "quick"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_status_2(arguments, told, refused):
    refused(arguments, told)


def commands(group, path=()):
    """(name, command) of every verb, those of groups included."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def test_the_manual_lists_the_verbs_and_options() -> None:
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", page, re.M | re.S))
    shared = dict(re.findall(r"^### (.*?)\n(.*?)(?=^### |\Z)", sections.pop("Options of several verbs"), re.M | re.S))
    found = dict(commands(typer.main.get_command(app)))
    assert {name.removeprefix("`draftree ").rstrip("`") for name in sections} == set(found)
    for name, command in found.items():
        section = sections[f"`draftree {name}`"]
        also = [shared[title] for title in re.findall(r"\[([\w ]+)\]\(#[\w-]+\)", section)]
        listed = set(re.findall(r"^- `(--[\w-]+)", "\n".join([section, *also]), re.M))
        assert listed >= {p.opts[0] for p in command.params if p.opts[0].startswith("--")} - {"--help"}, name


@pytest.mark.parametrize("settings", [{"COLUMNS": "30", "TERM": "dumb"}, {"COLUMNS": "300", "FORCE_COLOR": "1"}])
def test_the_page_is_up_to_date(settings: dict[str, str]) -> None:
    """The width and the colours of the terminal change nothing."""
    code = "import sys; from cli_reference import page; sys.stdout.buffer.write(page().encode())"
    environment = {**os.environ, **settings, "PYTHONPATH": os.pathsep.join([str(DOCS), *sys.path])}
    written = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout
    assert written.decode() == (DOCS / "cli.md").read_text(encoding="utf-8"), "run `make docs`"


def test_help_is_quick_to_import():
    """Printing help must not wait for torch."""
    code = "import sys\nsys.argv = ['draftree', '--help']\nfrom draftree.cli import main\n"
    code += "try: main()\nexcept SystemExit: pass\n"
    code += "print([name for name in ('torch', 'transformers', 'matplotlib') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip().splitlines()[-1] == "[]"


def test_coloured_text_keeps_characters_whole(demo):
    text = "Caf\u00e9 \u4e2d\u6587 \U0001f600 done"
    ids = demo.tokenizer(text, add_special_tokens=False).input_ids
    assert len(ids) > len(text.split()), "characters are spread over several tokens"
    grown = ColouredText(demo.tokenizer)
    for number, token in enumerate(ids):
        grown.add(token, "lookahead/output" if number % 2 else None)
    assert grown.text.plain.strip() == text
    assert any(str(span.style) == colour_of("lookahead") for span in grown.text.spans)
