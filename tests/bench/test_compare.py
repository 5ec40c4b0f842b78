"""`draftree bench compare`: Spec-Bench's files in and out, turns, batches, draws, the page."""

import copy
import json
import sys
from html import unescape

import pytest
import torch
from browser import look_at, needs_chromium
from typer.testing import CliRunner
from zoo import build

import draftree
from benchmarks.agree import agreement
from draftree import drafting
from draftree.bench.case import run_case
from draftree.bench.compare import JOURNAL, Plan, run_compare
from draftree.bench.inputs import Settings, Subject, encode_all
from draftree.bench.kit import Kit, WarmTrie
from draftree.bench.measure import measure
from draftree.bench.methods import Draftree, HuggingFace
from draftree.bench.names import LABELS, check_name
from draftree.bench.report import number
from draftree.bench.samples import Sampling
from draftree.bench.verdict import verdict
from draftree.cli import app, main
from draftree.drafter_names import TRAINED, UNTRAINED
from draftree.drafting import Lookahead, PromptLookup
from draftree.models import encode_prompt
from draftree.progress import Watcher
from draftree.prompts import embedded_prompts, read_prompts
from draftree.tuning.record import Record

QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["List all files.", "Now also the hidden ones."]},
    {"question_id": 82, "category": "shell", "turns": ["How do I rename a file?"]},
    {"question_id": 83, "category": "shell", "turns": ["Show the last ten lines of a log."]},
]
SHORT = ("--max-new-tokens", "8", "--no-compile", "--rounds", "1", "--drafter-warm", "1", "--threads", "1")


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "question.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    return path


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A run over everything that fits into seconds, through the command line."""
    folder = tmp_path_factory.mktemp("compare")
    path = folder / "question.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    methods = ["hf-generate", "hf-assisted", "draftree", "lookahead-warm", "medusa", "lookahead-cold+medusa"]
    chosen = [word for name in methods for word in ("--method", name)]
    arguments = ["bench", "compare", *SHORT, "--prompts", str(path), "--per-set", "2", "--batch", "1", "--batch", "2"]
    done = CliRunner().invoke(app, [*arguments, *chosen, "--temperature", "0", "--out", str(folder / "out")])
    assert done.exit_code == 0, done.output
    return folder / "out", done.output


def test_spec_bench_questions_are_read_as_they_are(questions):
    prompts = read_prompts(questions)
    assert (prompts[0].id, prompts[0].set, prompts[0].text) == ("81", "writing", "List all files.")
    assert prompts[0].later == ("Now also the hidden ones.",)
    assert prompts[1].later == ()


def test_a_later_turn_has_the_methods_own_answer_in_its_prompt(demo, questions):
    texts = encode_all(Subject(*demo), read_prompts(questions), Settings(per_set=2, max_new_tokens=8))
    method = HuggingFace("hf", demo.model, 8)
    samples = measure([method], texts.tasks, 1, Watcher(), tokenizer=demo.tokenizer)
    first, second = (s for s in samples if s.task == 0)
    assert (first.turn, second.turn) == (0, 1)
    said = demo.tokenizer.decode(first.answer.ids, skip_special_tokens=True)
    expected = encode_prompt(demo.tokenizer, QUESTIONS[0]["turns"][1], history=[(QUESTIONS[0]["turns"][0], said)])
    assert second.ids == expected
    assert len(expected) > len(texts.tasks[0].ids)
    assert sum(s.turn for s in samples) == 1, "one of the questions has a second turn"


def test_batches_give_what_single_prompts_give_and_share_their_time(demo):
    prompts = [encode_prompt(demo.tokenizer, p.text) for p in embedded_prompts()[:3]]
    for method in (HuggingFace("hf", demo.model, 12), Draftree("d", demo.model, 12, Lookahead)):
        together = method.answers(prompts)
        alone = [method.answer(ids) for ids in prompts]
        assert [a.ids for a in together] == [a.ids for a in alone]
        assert len({a.seconds for a in together}) == 1
        assert all(sum(a.lengths) == len(a.ids) for a in together)


def test_sampled_answers_equal_hugging_faces_and_its_drafting_says_that_it_draws_otherwise(demo):
    sampling = Sampling(0.9, top_p=0.95, seed=3)
    ids = encode_prompt(demo.tokenizer, "Write a shell command using ls: List all files.")
    theirs = HuggingFace("hf", demo.model, 16, sampling=sampling)
    ours = Draftree("d", demo.model, 16, Lookahead, sampling=sampling)
    greedy = HuggingFace("g", demo.model, 16)
    assert ours.answer(ids).ids == theirs.answer(ids).ids != greedy.answer(ids).ids
    assert theirs.same_draws
    lookup = HuggingFace("l", demo.model, 16, sampling=sampling, prompt_lookup_num_tokens=3)
    assert not lookup.same_draws


def test_a_model_whose_own_config_samples_is_measured_greedily(demo):
    """As every case that samples says so, and Hugging Face's side is asked for no draws."""
    model = copy.copy(demo.model)
    model.generation_config = copy.deepcopy(model.generation_config)
    model.generation_config.update(do_sample=True, temperature=3.0)
    ids = encode_prompt(demo.tokenizer, embedded_prompts()[0].text)
    greedy = HuggingFace("hf", demo.model, 12).answer(ids).ids
    assert Draftree("d", model, 12, Lookahead).answer(ids).ids == greedy
    assert HuggingFace("hf", model, 12).answer(ids).ids == greedy
    assert Record(model, 12, {})._plain(ids) == greedy


@pytest.mark.parametrize(
    ("names", "settings", "reference"),
    [
        (["lookahead-cold", "prompt-lookup"], {}, "lookahead-cold"),
        (
            ["hf-generate", "lookahead-cold", "prompt-lookup"],
            {"batch": 2, "sampling": Sampling(0.8, seed=1)},
            "lookahead-cold",
        ),
        (["hf-generate"], {"batch": 2, "sampling": Sampling(0.8, seed=1)}, "draftree-hooked"),
    ],
)
def test_without_plain_decoding_methods_are_compared_with_one_another(demo, names, settings, reference):
    prompts = [p for p in embedded_prompts() if p.set == "tldr_shell" and not p.warm][:2]
    given = Settings(2, 6, 1, 0, compiled=False, **settings)
    result = run_case(Kit(Subject(*demo), given), encode_all(Subject(*demo), prompts, given), names, Watcher())
    assert result.baselines.reference == reference
    assert all(row.differing == [] for row in result.rows.values())
    assert "was not measured" in verdict(result)


def test_encoder_decoders_are_sampled_as_hugging_face_samples_them():
    model, sampling = build("t5"), Sampling(0.9, seed=3)
    theirs, ours = HuggingFace("hf", model, 8, sampling), Draftree("d", model, 8, PromptLookup, sampling=sampling)
    assert ours.answer([5, 6, 7, 8, 9]).ids == theirs.answer([5, 6, 7, 8, 9]).ids


def test_hugging_faces_steps_are_counted_from_outside(demo):
    ids = encode_prompt(demo.tokenizer, embedded_prompts()[0].text)
    lookup = HuggingFace("l", demo.model, 24, prompt_lookup_num_tokens=5)
    answer = lookup.answer(ids)
    assert sum(answer.lengths) == len(answer.ids)
    assert answer.ids == HuggingFace("hf", demo.model, 24).answer(ids).ids
    with pytest.raises(ValueError, match="one prompt at a time"):
        lookup.answers([ids, ids])


def test_every_case_is_told_with_its_prompts_and_no_answer_differs(compared):
    out, said = compared
    told = json.loads((out / "bench-compare.json").read_text())
    assert {"experiment", "source", "says", "complete", "about", "columns", "rows", "remarks", "tables"} <= set(told)
    single, pair = told["more"]["cases"]
    assert [case["about"]["case"] for case in (single, pair)] == ["batch 1, greedy", "batch 2, greedy"]
    for row in told["rows"]:
        assert row["differing_prompts"] == []
        assert row["commit"] is None or isinstance(row["commit"], str)
    names = {row["name"] for row in told["rows"] if row["case"] == "batch 1, greedy"}
    assert names == {"hf-generate", "hf-assisted", "draftree", "medusa", "lookahead-cold+medusa"}
    assert single["not_measured"] == {"lookahead-warm": "no prompts to warm the trie with"}
    assert {s["turn"] for s in single["samples"] if "turn" in s} == {1}
    assert pair["not_measured"]["hf-assisted"].endswith("at a time")
    assert pair["about"]["prompts"] == 2, "a third prompt does not fill a batch of two"
    assert "\x1b" not in said


def test_answers_are_written_as_spec_bench_reads_them(compared):
    out, _ = compared
    path = out / "answers" / "embedded-chat-4m" / "batch-1-greedy" / "medusa.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    first = next(row for row in rows if row["question_id"] == 81)
    assert first["category"] == "writing"
    (choice,) = first["choices"]
    assert set(choice) == {"index", "turns", "decoding_steps", "new_tokens", "wall_time", "accept_lengths"}
    assert len(choice["turns"]) == len(choice["new_tokens"]) == len(choice["wall_time"]) == 2
    assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"])
    assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])


def test_csv_and_markdown_say_what_json_says(compared):
    import csv

    out, _ = compared
    told = json.loads((out / "bench-compare.json").read_text())["rows"]
    speeds = {row["name"]: row["tokens/s"] for row in told if row["case"] == "batch 1, greedy"}
    with (out / "bench-compare.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if r["case"] == "batch 1, greedy" and r["set"] == "all"]
    assert {r["name"]: float(r["tokens/s"]) for r in rows} == pytest.approx(speeds)
    assert all(float(r["verify_seconds"]) > 0 for r in rows if r["name"] == "medusa")
    text = (out / "bench-compare.md").read_text()
    assert f"| Medusa | {number(speeds['medusa'])} [" in text
    assert "- Lookahead, warm trie was not measured: no prompts to warm the trie with." in text


def test_every_file_for_people_opens_with_a_verdict_of_each_case(compared):
    out, said = compared
    told = json.loads((out / "bench-compare.json").read_text())
    printed = " ".join(said.split())
    for case, named in zip(told["more"]["cases"], told["verdicts"], strict=True):
        place, verdict = named.split(": ", 1)
        assert place == f"{case['about']['model']}, {case['about']['case']}"
        assert verdict.endswith(" All answers are equal.")
        assert verdict in printed
        assert f"## {place}\n\n{verdict}\n" in (out / "bench-compare.md").read_text()
        page = unescape((out / "bench-compare.html").read_text())
        assert f'<h2>{place}</h2>\n<p class="verdict">{verdict}</p>' in page


@needs_chromium
@pytest.mark.parametrize("width", [1280, 400])
def test_the_report_shows_its_pictures_without_an_error(compared, tmp_path, width):
    out, _ = compared
    seen = look_at(out / "bench-compare.html", tmp_path, width)
    assert seen.console == []
    assert seen.dom.count("<h2>") == seen.dom.count('<img alt="embedded chat-4m, batch') == 2, "a picture for each case"
    assert seen.dom.count("<tr>") > 10
    assert "://" not in seen.dom, "nothing is fetched; base64 has no colon"
    assert seen.picture.stat().st_size > 20_000


def test_two_results_agree_or_say_where_they_do_not():
    def result(**given):
        """Speeds over HF generate, low and high a tenth off; over plain decoding the same by its speed."""
        rows = []
        speeds = {name.replace("_", "-"): value for name, value in given.items()}
        for name, value in speeds.items():
            row = {"model": "m", "case": "c", "name": name}
            for column, reference in (("over HF generate", "hf-generate"), ("over plain", "draftree")):
                over = value / speeds[reference]
                row |= {column: over, f"{column}_low": 0.9 * over, f"{column}_high": 1.1 * over}
            rows.append(row)
        return {"rows": rows}

    first = result(hf_generate=1.0, hf_compiled=1.2, draftree=5.0, trie=8.0)
    head = "c: 0 of 6 pairs in another order, {} of 2 speeds further apart than their intervals explain; "
    refs = "draftree over HF generate 5.00 [4.50, 5.50] and "
    assert agreement(first, first) == [head.format(0) + refs + "5.00 [4.50, 5.50]"]
    # All of ours a fifth slower beside HF generate: one figure has moved, and not that of every method.
    drifted = result(hf_generate=1.0, hf_compiled=1.25, draftree=4.0, trie=6.5)
    assert agreement(first, drifted) == [head.format(0) + refs + "4.00 [3.60, 4.40]"]
    told = agreement(first, result(hf_generate=1.0, hf_compiled=1.2, draftree=5.0, trie=9.3))
    assert told[0].startswith(head.format(1))
    assert told[1] == "  trie over plain: 1.60 [1.44, 1.76] and 1.86 [1.67, 2.05]"
    told = agreement(first, result(hf_generate=1.0, hf_compiled=9.0, draftree=5.0, trie=8.0))
    assert "  hf-compiled and draftree have changed places" in told
    assert any(line.startswith("  hf-compiled over HF generate: 1.20") for line in told)
    other = result(hf_generate=1.0, draftree=5.0)
    for row in other["rows"]:
        row["model"] = "another"
    assert agreement(first, other) == ["The two results have no case in common."]


def test_names_have_one_spelling_and_drafters_may_be_merged():
    check_name("hidden-transfer+lookahead-warm")
    assert not [name for name in LABELS if "_" in name]
    with pytest.raises(ValueError, match="Did you mean 'lookahead-warm'"):
        check_name("lookahead_warm")
    with pytest.raises(ValueError, match="'hf-generate' is no drafter that can be merged"):
        check_name("hf-generate+medusa")


def test_drafters_have_the_names_of_the_command_line():
    assert [getattr(drafting, kind).name for kind in UNTRAINED.values()] == list(UNTRAINED)
    assert set(LABELS) > set(TRAINED)


def test_a_folder_is_itself_whatever_it_is_called(demo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draftree.demo_drafter("medusa", demo.model).save_pretrained("lookahead")
    kit = Kit(Subject(*demo), Settings(max_new_tokens=8))
    assert isinstance(kit.maker("lookahead")(), draftree.Medusa)


def test_the_help_lists_every_method(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    said = " ".join(CliRunner().invoke(app, ["bench", "compare", "--help"]).output.replace("│", " ").split())
    assert not [name for name in LABELS if name not in said]


def test_a_method_that_needs_what_is_not_there_says_so(demo):
    other = torch.nn.Linear(1, 1)
    made, left_out = Kit(Subject(other, None), Settings(compiled=False)).methods(["hf-compiled", "lookahead-warm"])
    assert made == []
    assert left_out == {"hf-compiled": "--no-compile", "lookahead-warm": "no prompts to warm the trie with"}


def test_draws_of_a_batch_are_compared_with_the_plain_engine(demo):
    prompts = [p for p in embedded_prompts() if p.set == "tldr_shell" and not p.warm][:2]
    settings = Settings(2, 6, 1, 0, compiled=False, batch=2, sampling=Sampling(0.8, seed=1))
    texts = encode_all(Subject(*demo), prompts, settings)
    kit = Kit(Subject(*demo), settings)
    names = ("hf-generate", "draftree", "lookahead-cold")
    result = run_case(kit, texts, names, Watcher())
    assert result.baselines.reference == "draftree"
    assert result.baselines.uncompared == {"hf-generate"}
    assert result.rows["lookahead-cold"].differing == []


def test_no_trie_is_warmed_where_no_method_has_one(monkeypatch, tmp_path):
    def learn(*given):
        raise RuntimeError("warmed")

    monkeypatch.setattr(WarmTrie, "learn", learn)
    prompts = [p for p in embedded_prompts() if p.set == "tldr_shell"][:3]
    settings = Settings(1, 3, 1, 2, compiled=False)

    def compared(*methods):
        (case,) = run_compare([None], prompts, Plan(settings, methods, (1,), (None,)), tmp_path, Watcher()).cases
        return set(case.rows)

    assert compared("draftree", "lookahead-cold") == {"draftree", "lookahead-cold"}
    with pytest.raises(RuntimeError, match="warmed"):
        compared("draftree", "lookahead-16")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--method", "medussa"], "Did you mean 'medusa'?"),
        (["--prompts", "nowhere.jsonl"], "There is no prompts file 'nowhere.jsonl'"),
        (["--temperature", "0", "--top-k", "5"], "--top-k and --top-p shape draws"),
        (["--against", "nowhere.json"], "nowhere.json is no result of bench compare"),
        (["--batch", "0"], "--batch"),
        (["--seed", "99999999999999999999"], "seed is 99999999999999999999: give at most"),
        (["--method", "lookahead-warm", "--drafter-warm", "0", "--per-set", "1"], "no prompts to warm the trie with"),
        (["--method", "hf-compiled", "--no-compile", "--per-set", "1"], "greedy; hf-compiled: --no-compile): give one"),
        (["--model", "./no-such-folder"], "no model folder './no-such-folder'"),
        (["--per-set", "1", "--batch", "99"], "prompts do not fill a batch of 99"),
        (["--max-new-tokens", "5000"], "context"),
        (["--method", "."], "has no draftree_config.json"),
        (["--assistant", ".", "--method", "medusa"], "No --method uses the small model of --assistant"),
    ],
)
def test_wrong_input_is_one_sentence(arguments, told, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["draftree", "bench", "compare", "--out", str(tmp_path), *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    said = capsys.readouterr()
    assert stopped.value.code == 2
    assert told in " ".join(said.err.replace("│", " ").split())
    assert "Traceback" not in said.err
    assert not (tmp_path / JOURNAL).exists()
