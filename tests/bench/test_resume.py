"""A stopped `draftree bench compare` goes on: what is kept, what is learned again, and what is not gone on with."""

import json
from dataclasses import replace

import pytest
import torch

import draftree
from draftree.bench.compare import JOURNAL, Plan, run_compare
from draftree.bench.inputs import Settings, Subject
from draftree.bench.kit import Kit
from draftree.bench.log import as_dict, from_dict
from draftree.bench.measure import measure
from draftree.bench.methods import Draftree, Method
from draftree.bench.samples import Answer, Sample, Task
from draftree.drafting import Lookahead
from draftree.models import encode_prompt
from draftree.progress import Watcher
from draftree.prompts import Prompt, embedded_prompts


def test_samples_come_back_from_the_journal_as_they_were(demo):
    task = Task(Prompt("p", "s", "x"), encode_prompt(demo.tokenizer, "List all files."))
    (sample,) = measure([Draftree("d", demo.model, 6, Lookahead)], [task], 1, Watcher())
    assert from_dict(json.loads(json.dumps(as_dict(sample)))) == sample


class Killed(Watcher):
    """A watcher that ends the process's run after some steps."""

    def __init__(self, steps):
        self.left = steps

    def step(self):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def test_a_killed_run_goes_on_where_it_stopped(tmp_path, monkeypatch):
    prompts = [p for p in embedded_prompts() if p.set == "tldr_shell" and not p.warm][:4]
    settings = Settings(per_set=4, max_new_tokens=6, rounds=2, warm_per_set=0, compiled=False)
    plan = Plan(settings, ("draftree", "lookahead-cold"), (1,), (None,))
    with pytest.raises(KeyboardInterrupt):
        run_compare([None], prompts, plan, tmp_path, Killed(11))
    assert (tmp_path / JOURNAL).is_dir()
    with pytest.raises(ValueError, match="holds data of another"):
        run_compare([None], prompts, replace(plan, methods=("draftree",)), tmp_path, Watcher())
    asked = []
    honest = Draftree.answers
    monkeypatch.setattr(Draftree, "answers", lambda self, prompts: asked.append(self.name) or honest(self, prompts))
    found = run_compare([None], prompts, plan, tmp_path, Watcher())
    ((result,),) = found.models.values()
    assert found.resumed == 5, "five whole groups were answered before the stop"
    assert asked.count("lookahead-cold") == 2 + 3, "two first calls, and the groups that were left"
    assert len(result.samples) == 2 * 4 * 2
    assert not any(row.differing for row in result.rows.values())
    assert not (tmp_path / JOURNAL).exists(), "a finished run leaves nothing to go on with"


@pytest.mark.parametrize("merged", [False, True])
def test_a_trie_learns_again_what_it_had_answered_before_the_stop(demo, merged):
    ids = encode_prompt(demo.tokenizer, "List all files.")
    method = Kit(Subject(*demo), Settings(max_new_tokens=8)).method(
        "lookahead-cold+hidden-transfer" if merged else "lookahead-cold"
    )

    def nodes():
        return (method.drafter.drafters[0] if merged else method.drafter).trie.nodes

    answer = method.answer(ids)
    held = nodes()
    method.start()
    method.recall(ids, answer.ids)
    assert nodes() == held > 0


@pytest.mark.parametrize("name", ["draftree", "draft-model", "prompt-lookup", "medusa", "bita"])
def test_drafters_without_a_trie_go_on_after_a_stop(demo, name):
    ids = encode_prompt(demo.tokenizer, "List all files.")
    method = Kit(Subject(*demo), Settings(max_new_tokens=8)).method(name)
    answer = method.answer(ids)
    method.start()
    method.recall(ids, answer.ids)
    assert method.answer(ids).ids == answer.ids


@pytest.mark.parametrize("changed", ["model", "drafter"])
def test_a_stopped_run_does_not_go_on_with_what_was_saved_anew(demo, tmp_path, changed):
    model, drafter = tmp_path / "model", tmp_path / "drafter"
    demo.model.save_pretrained(model)
    demo.tokenizer.save_pretrained(model)
    medusa = draftree.demo_drafter("medusa", demo.model)
    medusa.save_pretrained(drafter)
    plan = Plan(Settings(2, 4, 1, 0, compiled=False), ("draftree", str(drafter)), (1,), (None,))
    prompts = [p for p in embedded_prompts() if p.set == "tldr_shell"][:2]
    with pytest.raises(KeyboardInterrupt):
        run_compare([str(model)], prompts, plan, tmp_path / "out", Killed(3))
    if changed == "model":
        (model / "generation_config.json").write_text("{}")
    else:
        with torch.no_grad():
            next(medusa.weights.parameters()).mul_(2)
        medusa.save_pretrained(drafter)
    with pytest.raises(ValueError, match="holds data of another model or drafter"):
        run_compare([str(model)], prompts, plan, tmp_path / "out", Killed(1))


def test_two_models_or_methods_of_one_name_are_refused_before_any_work(demo, tmp_path):
    """Tables and files would call both the same, and the answers of one would replace those of the other."""
    folders = [tmp_path / place / "same" for place in ("a", "b")]
    for folder in folders:
        demo.model.save_pretrained(folder)
        demo.tokenizer.save_pretrained(folder)
    plan = Plan(Settings(1, 4, 1, 0, compiled=False), ("draftree",), (1,), (None,))
    with pytest.raises(ValueError, match="Two models would be called 'same'"):
        run_compare([str(folder) for folder in folders], embedded_prompts()[:1], plan, tmp_path / "out", Killed(1))
    methods = tuple(str(tmp_path / place / "medusa") for place in ("a", "b"))
    with pytest.raises(ValueError, match="Two methods would be called 'medusa'"):
        run_compare([None], embedded_prompts()[:1], replace(plan, methods=methods), tmp_path / "out", Killed(1))
    assert not (tmp_path / "out").exists()


class Held:
    """A log of a run in which everything was answered before."""

    def __init__(self, samples):
        self.samples = samples

    def held(self):
        return self.samples


def test_what_was_answered_is_not_asked_again():
    class Silent(Method):
        def answers(self, prompts):
            raise AssertionError("asked")

    task = Task(Prompt("p", "s", "x"), [1])
    held = [as_sample("m", Answer([5], 1.0))]
    assert measure([Silent("m")], [task], 1, Watcher(), log=Held(held)) == held


def as_sample(method, answer):
    return Sample(method, 0, 0, answer)
