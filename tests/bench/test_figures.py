"""Figures of a benchmark: totals and intervals, equality with its position and gap, and what prompts may be."""

import json
import sys

import pytest
import torch

from draftree.bench.measure import (
    Sample,
    Task,
    count_disturbed,
    difference,
    find_differences,
    measure,
    ready,
    summarise,
)
from draftree.bench.methods import Answer, Method
from draftree.bench.report import describe
from draftree.prompts import Prompt, Watcher, embedded_prompts, read_prompts, split_prompts, take_per_set


class Scripted(Method):
    """Answers with a given number of tokens, in a given time."""

    def __init__(self, name, tokens=10, seconds=1.0, fails=None, optional=False):
        super().__init__(name)
        self.tokens, self.seconds, self.fails, self.optional = tokens, seconds, fails, optional
        self.log = []

    def start(self):
        self.log.append("start")

    def answers(self, prompts):
        if self.fails:
            raise RuntimeError(self.fails)
        self.log += map(tuple, prompts)
        return [Answer([1] * self.tokens, self.seconds) for _ in prompts]


def tasks(count, sets=("a",)):
    return [Task(Prompt(f"p{i}", sets[i % len(sets)], "text"), [i] * (i + 1)) for i in range(count)]


def test_every_method_answers_a_prompt_before_the_next_prompt_comes_and_the_order_rotates():
    methods = [Scripted("x"), Scripted("y"), Scripted("z")]
    samples = measure(methods, tasks(4), 2, Watcher())
    order = [(s.round, s.task, s.method) for s in samples]
    assert [o[:2] for o in order] == [(r, t) for r in range(2) for t in range(4) for _ in methods]
    firsts = [order[i][2] for i in range(0, len(order), 3)]
    assert firsts == ["x", "y", "z", "x", "y", "z", "x", "y"]
    assert all(method.log.count("start") == 2 for method in methods), "a fresh drafter for every round"


def test_an_optional_method_that_fails_is_left_out_with_its_reason_and_others_stop_the_run():
    broken = Scripted("broken", fails="no compiler\nlong trace", optional=True)
    usable, refused = ready([Scripted("x"), broken], tasks(3))
    assert [method.name for method in usable] == ["x"]
    assert refused == {"broken": "no compiler"}
    with pytest.raises(RuntimeError, match="real bug"):
        ready([Scripted("x", fails="real bug")], tasks(3))


def test_first_calls_see_the_longest_prompt_and_the_shortest():
    method = Scripted("x")
    ready([method], tasks(5))
    assert method.log == [(4,) * 5, (0,)]


def sample(method, task, tokens, seconds, round=0, stats=None, ids=None):
    return Sample(method, task, round, Answer(ids or [1] * tokens, seconds, stats))


def test_speed_is_total_tokens_over_total_time_and_not_an_average_of_ratios():
    samples = [sample("hf", 0, 10, 1.0), sample("hf", 1, 90, 9.0), sample("us", 0, 10, 0.1), sample("us", 1, 90, 9.0)]
    row = summarise(samples, tasks(2), ["hf"])["us"]
    assert row.tokens == 100
    assert row.speed.value == pytest.approx(100 / 9.1)
    assert row.over["hf"].value == pytest.approx(10 / 9.1)  # the average of the ratios would be 5.5


def test_intervals_hold_the_value_and_are_paired_by_prompt():
    # Times vary tenfold between prompts, but "us" always takes half of what "hf" takes.
    samples = []
    for i in range(12):
        samples += [sample("hf", i, 10, 1.0 + i), sample("us", i, 10, (1.0 + i) / 2)]
    row = summarise(samples, tasks(12), ["hf"])["us"]
    assert row.speed.low < row.speed.value < row.speed.high
    assert row.over["hf"].low == pytest.approx(2) == row.over["hf"].high
    again = summarise(samples, tasks(12), ["hf"])["us"]
    assert again.speed == row.speed, "the bootstrap is seeded"


def test_one_prompt_has_no_interval():
    row = summarise([sample("hf", 0, 10, 1.0)], tasks(1), ["hf"])["hf"]
    assert (row.speed.value, row.speed.low, row.speed.high) == (10.0, None, None)


def test_answers_over_twice_as_slow_as_their_other_round_are_counted():
    samples = [sample("us", 0, 10, 1.0), sample("us", 1, 10, 1.0), sample("us", 0, 10, 2.5, round=1)]
    samples.append(sample("us", 1, 10, 1.9, round=1))
    assert count_disturbed(samples) == (1, 4)
    assert count_disturbed(samples[:2]) == (0, 0)


@torch.no_grad()
def test_difference_tells_position_ids_and_the_gap_of_the_true_logits(demo):
    prompt, expected = [5, 6, 7], [10, 11, 12, 13]
    logits = demo.model(torch.tensor([[5, 6, 7, 10, 11]])).logits[0, -1]
    best, second = logits.topk(2).values.tolist()
    where = difference(demo.model, prompt, expected, [10, 11, 99, 13])
    assert (where.position, where.expected, where.found) == (2, 12, 99)
    assert where.gap == pytest.approx(best - second, abs=1e-4)
    assert difference(demo.model, prompt, expected, list(expected)) is None


@pytest.mark.parametrize(
    ("expected", "found", "told"),
    [([1, 2], [1, 2, 3], (2, None, 3)), ([1, 2, 3], [1, 2], (2, 3, None)), ([], [4], (0, None, 4))],
)
def test_an_answer_that_goes_on_or_stops_short_differs_at_the_end_of_the_shorter(demo, expected, found, told):
    where = difference(demo.model, [5], expected, found)
    assert (where.position, where.expected, where.found) == told


def test_a_prompt_that_differs_in_both_rounds_is_listed_once(demo):
    samples = [
        sample("hf", 0, 0, 1.0, ids=[1, 2, 3]),
        sample("us", 0, 0, 1.0, ids=[1, 2, 4]),
        sample("us", 0, 0, 1.0, round=1, ids=[1, 2, 4]),
        sample("hf", 1, 0, 1.0, ids=[1]),
        sample("us", 1, 0, 1.0, ids=[1]),
    ]
    rows = summarise(samples, tasks(2), ["hf"])
    find_differences(rows, samples, tasks(2), "hf", demo.model)
    assert [(task.prompt.id, where.position) for task, where in rows["us"].differing] == [("p0", 2)]
    assert rows["hf"].differing == []


def test_a_result_file_names_no_folder_of_this_machine(demo, monkeypatch):
    arguments = ["draftree", "bench", "quick", "--out", "/home/me/x", "--prompts=/data/dev", "--per-set=2", "a/b"]
    monkeypatch.setattr(sys, "argv", arguments)
    about = describe(demo.model, "/models/llama")
    assert about["command"] == "draftree bench quick --out x --prompts=dev --per-set=2 a/b"
    assert about["model"] == "llama"


# ---------------------------------------------------------------- prompts


def test_embedded_prompts_hold_thirteen_sets_with_test_and_warm_rows_apart():
    prompts = embedded_prompts()
    assert len({p.set for p in prompts}) == 13
    assert sum(p.warm for p in prompts) == 13 * 23
    tests = {p.text for p in prompts if not p.warm}
    assert len(tests) == 130
    assert not tests & {p.text for p in prompts if p.warm}, "no test prompt may warm a drafter"


def test_take_per_set_takes_sets_in_turn():
    prompts = [Prompt(str(i), name, "x") for i, name in enumerate("aaabbc")]
    assert [p.set for p in take_per_set(prompts, 2)] == ["a", "b", "c", "a", "b"]


def test_prompts_without_a_split_warm_with_what_is_not_measured():
    prompts = [Prompt(str(i), "a", f"text {i % 5}") for i in range(8)]  # texts 0, 1, 2 come twice
    measured, warming = split_prompts(prompts, 2, 3)
    assert [p.id for p in measured] == ["0", "1"]
    assert [p.id for p in warming] == ["2", "3", "4"]
    _, all_others = split_prompts(prompts, 2, 100)
    assert not {p.text for p in all_others} & {p.text for p in measured}


def test_a_folder_of_files_is_read_and_names_its_sets(tmp_path):
    (tmp_path / "one.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": "b", "set": "own", "id": 7, "split": "warm"}\n')
    (tmp_path / "two.jsonl").write_text('{"prompt": "c", "response": "ignored"}\n')
    (tmp_path / "notes.txt").write_text("not read")
    found = read_prompts(tmp_path)
    assert found == [
        Prompt("one-1", "one", "a"),
        Prompt("7", "own", "b", warm=True),
        Prompt("two-1", "two", "c"),
    ]
    (tmp_path / "one.jsonl").write_text(
        '{"question": "a"}\n{"turns": ["b", "c"]}\n{"turns": 3, "prompt": " ", "question": "d"}\n'
    )
    found = [(prompt.text, prompt.later) for prompt in read_prompts(tmp_path)]
    assert found == [("a", ()), ("b", ("c",)), ("d", ()), ("c", ())]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "is empty"),
        ("prompt: hello\n", "line 1, is not JSON"),
        ('{"prompt": "a"}\n["b"]\n', "line 2, has no 'turns' or 'prompt'"),
        ('{"prompt": "  "}\n', "line 1, has no 'turns' or 'prompt'"),
        (json.dumps({"prompt": 3}), "line 1, has no 'turns' or 'prompt'"),
        (
            json.dumps({"id": 1, "turns": []}),
            "line 1, has no 'turns' or 'prompt' or 'question' with text, but id, turns",
        ),
        (json.dumps({"turns": ["ok", " "]}), "line 1, has no 'turns'"),
        (b"\xff\xfe\x00", "is not UTF-8"),
    ],
)
def test_a_bad_prompts_file_is_one_sentence(tmp_path, content, told):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=told) as caught:
        read_prompts(path)
    assert "\n" not in str(caught.value)


def test_a_file_may_begin_with_a_mark_and_characters_may_be_written_in_halves(tmp_path):
    path = tmp_path / "marked.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + rb'{"prompt": "a \ud83d\ude00"}')
    assert [prompt.text for prompt in read_prompts(path)] == ["a \N{GRINNING FACE}"]


def test_no_file_and_an_empty_folder_are_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="There is no prompts file"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match=r"holds no \.jsonl file"):
        read_prompts(tmp_path)
