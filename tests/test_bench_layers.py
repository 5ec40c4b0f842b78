"""`draftree bench layers`: lossless ways say what plain decoding says, CALM at 1 as well, and files hold every way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftree.bench.layers import LayersSettings, _kept, run_layers
from draftree.cli import app
from draftree.drafting.folder import demo_drafter
from draftree.prompts import embedded_prompts


def test_the_command_measures_and_writes(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": p.text} for p in embedded_prompts() if p.set == "wikisql"][:2]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    few = ["--max-new-tokens", "12", "--rounds", "1", "--chain", "2", "--exit-layer", "4", "--threshold", "0.9"]
    done = CliRunner().invoke(
        app, ["bench", "layers", "--prompts", str(prompts), *few, "--threshold", "1", "--out", str(tmp_path)]
    )
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "bench-layers.json").read_text())
    ways = {row["way"]: row for row in found["rows"]}
    assert set(ways) == {
        *("plain", "skip set", "skip set, chain of 2", "exit 4", "exit 4, chain of 2"),
        *("CALM 0.9 (lossy)", "CALM 1 (lossy)"),
    }
    assert found["differing"] == []
    assert all(row["left_of_the_text"] == 1 for name, row in ways.items() if "0.9" not in name)
    assert ways["CALM 1 (lossy)"]["layers_a_token"] == 8
    assert 1 <= ways["CALM 0.9 (lossy)"]["layers_a_token"] < 8
    assert ways["skip set, chain of 2"]["guesses_a_step"] > 1
    assert ways["plain"]["speed"]["value"] == 1
    assert (tmp_path / "bench-layers.png").exists()


def test_an_inflated_model_leaves_out_the_same(demo) -> None:  # type: ignore[no-untyped-def]
    prompts = [p for p in embedded_prompts() if p.set == "wikisql"][:1]
    settings = LayersSettings(1, 10, 1, (2,), (4,), ())
    accepted = []
    for params in (None, "20M"):
        findings, about = run_layers(
            demo.model,
            demo.tokenizer,
            prompts,
            settings,
            skip_set=demo_drafter("self-speculative", demo.model),
            params=params,
        )
        assert findings.more["differing"] == []
        accepted.append([row["tokens_a_step"] for row in findings.rows if row["kind"] == "chain"])
    assert "inflated to 20M" in about["model"]
    assert accepted[0] == accepted[1]


def test_what_does_not_fit_is_told_before_any_work(demo) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="give 1 to 7"):
        run_layers(demo.model, demo.tokenizer, embedded_prompts(), LayersSettings(exits=(8,)))


def test_what_is_left_of_a_text() -> None:
    assert _kept([1, 2, 3], [1, 2, 3]) == (3, 3)
    assert _kept([1, 9, 3], [1, 2, 3]) == (1, 3)
    assert _kept([1, 2], [1, 2, 3]) == (2, 3)
