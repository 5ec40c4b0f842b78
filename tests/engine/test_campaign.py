"""Random cases: twenty in every run, 2,000 in the slow suite; and tests that the campaign finds errors."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import campaign
import campaign_cases
import pytest
import torch
from runner_driver import one_thread  # noqa: F401
from zoo import build

HERE = Path(__file__).parents[1]


def check(found: list[dict[str, Any]]) -> None:
    bad = [one for one in found if one["outcome"] in ("differs", "error")]
    assert not bad, bad[:3]
    exact = [one for one in found if one["row"][0] == "float32"]
    assert sum(one["outcome"] == "near-tie" for one in exact) <= len(exact) / 1000
    assert sum(one["accepted"] for one in found) > len(found)
    assert sum(one["hugging_face"] for one in exact) > len(exact) / 3


def test_the_first_cases() -> None:
    check(campaign.run(7, range(20), None, lambda line: None))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, 2000, 250))
def test_many_cases(first: int) -> None:
    check(campaign.run(8, range(first, first + 250), None))


def test_a_case_is_drawn_from_its_number_alone() -> None:
    assert campaign_cases.draw(3, 17) == campaign_cases.draw(3, 17)
    assert campaign_cases.draw(3, 17) != campaign_cases.draw(4, 17)


def llama_case(**changes: Any) -> campaign_cases.Case:
    options = {"max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": []}
    plain = {
        "number": 0, "family": "llama", "dtype": "float32", "runner": "hooked", "drafter": "random",
        "shape": "fixed-16", "pruner": None, "through": "generate", "prompts": [[5, 6, 7], [9, 8]], "options": options,
        "strict": False, "seed": 5, "slots": 2, "again": False,
    }  # fmt: skip
    return campaign_cases.Case(**plain | changes)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_wrong_token_is_found(sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = llama_case()
    if sampled:
        case.options.update(do_sample=True, temperature=0.8, top_k=10)
    answers = campaign.answers

    def wrong(case: Any, drafter: Any) -> Any:
        found, accepted = answers(case, drafter)
        if drafter is not None:
            found[1][3] = (found[1][3] + 1) % 97
        return found, accepted

    assert campaign.attempt(case)["outcome"] == "equal"
    monkeypatch.setattr(campaign, "answers", wrong)
    found = campaign.attempt(case)
    assert found["outcome"] == "differs"
    assert [(part["what"], part["row"], part["at"]) for part in found["parts"]] == [("plain", 1, 3)]
    assert found["parts"][0]["gap"] > found["parts"][0]["bound"]


def test_answers_of_other_lengths_and_errors_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case, answers = llama_case(), campaign.answers
    monkeypatch.setattr(campaign, "answers", lambda c, d: ([a[: 8 - (d is not None)] for a in answers(c, d)[0]], 0))
    assert campaign.attempt(case)["outcome"] == "differs"

    def fails(case: Any, drafter: Any) -> Any:
        raise RuntimeError("now")

    monkeypatch.setattr(campaign, "answers", fails)
    found = campaign.attempt(case)
    assert (found["outcome"], found["error"]) == ("error", "RuntimeError: now")


def test_a_near_tie_is_told_by_its_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens with almost the same row of the head: either may be chosen, no third one."""
    case, model = llama_case(), copy.deepcopy(build("llama"))
    best = campaign.answers(case, None)[0][1][0]
    twin, other = (best + 1) % 97, (best + 2) % 97
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[best] * (1 + 1e-6)
    monkeypatch.setattr(campaign, "model_of", lambda family, dtype: model)
    near, bound = campaign.gap(case, 1, [], best, twin)
    far, _ = campaign.gap(case, 1, [], best, other)
    assert near < bound < far


def test_the_page_has_the_result() -> None:
    about = json.loads((HERE / "data" / "campaign.json").read_text(encoding="utf-8"))
    page = (HERE.parent / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert "\n".join(campaign.report(about)) in page
    assert set(about["outcomes"]) <= {"equal", "near-tie", "refused"}
    assert f"{about['cases']:,} cases" in page
