"""`draftree bench inflate` through its own door: files that parse, figures that follow from samples, plain errors."""

import json
import statistics

import pytest
import torch
from typer.testing import CliRunner

from draftree.bench import inflate_report
from draftree.bench.inflate.model import inflate
from draftree.bench.inflate_measure import HF, LOOP, ROWS, Bandwidth, InflateSettings, compare_models
from draftree.cli import app
from draftree.models import encode_prompt
from draftree.progress import Watcher
from draftree.prompts import embedded_prompts

TINY = ["bench", "inflate", "--params", "20M", "--rounds", "2", "--answers", "1", "--max-new-tokens", "6"]


def test_it_writes_figures_that_follow_from_its_samples(tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "made" / "here"
    done = CliRunner().invoke(app, [*TINY, "--context", "16", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.output
    assert "all 6 greedy tokens are equal" in " ".join(done.output.split())
    result = json.loads((out / "bench-inflate.json").read_text())
    assert {(row["method"], row["rows"]) for row in result["rows"]} == {(m, n) for m in (HF, LOOP) for n in ROWS}
    one = {row["method"]: row["seconds"] for row in result["rows"] if row["rows"] == 1}
    for row in result["rows"]:
        assert len(row["samples"]) == 2
        assert row["seconds"] == statistics.median(row["samples"])
        assert row["over_one_row"] == pytest.approx(row["seconds"] / one[row["method"]])
        assert row["floor_share"] == pytest.approx(result["floor"]["seconds"] / row["seconds"])
        for fact in ("commit", "device", "dtype", "threads", "command"):
            assert fact in row
    size = result["about"]["size"]
    read = size["parameters"] - size["vocab_size"] * size["hidden_size"]
    assert result["floor"]["weight_bytes"] == 4 * read
    assert result["floor"]["seconds"] == pytest.approx(4 * read / result["floor"]["bandwidth"])
    assert result["equality"]["logits"] < 1e-3 * result["equality"]["spread"]
    assert result["about"]["model"] == "embedded chat-4m inflated to 20M"
    assert str(tmp_path) not in json.dumps(result), "no machine paths in a result file"
    assert (out / "bench-inflate.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_figures_are_written_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("draftree.bench.plot.has_matplotlib", lambda: False)
    done = CliRunner().invoke(app, [*TINY, "--dtype", "bfloat16", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "draftree[bench]" in done.output
    result = json.loads((tmp_path / "bench-inflate.json").read_text())
    assert result["about"]["dtype"] == "bfloat16"
    assert result["about"]["host"] == "loop, captured"
    assert not (tmp_path / "bench-inflate.png").exists()
    monkeypatch.setattr(inflate_report, "has_matplotlib", lambda: False)
    with pytest.raises(ValueError, match=r"draftree\[bench\]"):
        inflate_report.write_png(None, tmp_path)


@torch.no_grad()
def test_models_that_are_not_equal_are_told_with_the_place(demo):
    large = inflate(demo.model, "20M")
    large.model.layers[0].mlp.down_proj.weight += 0.1
    prompt = encode_prompt(demo.tokenizer, embedded_prompts()[0].text)
    found = compare_models(demo.model, large, [prompt], InflateSettings(max_new_tokens=6), Watcher())
    assert found["logits"] > 0.1 * found["spread"]
    assert found["differing"][0]["prompt"] == 0
    assert "first differs at new token" in found["differing"][0]["where"]


def test_bandwidth_is_that_of_memory():
    memory = Bandwidth(torch.device("cpu"))
    for _ in range(3):
        memory.sample()
    assert 1e9 < memory.best < 2e12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--params", "50M", "--shape", "llama-7b"], "give --params or --shape"),
        (["--params", "plenty"], "no number of parameters"),
        (["--shape", "llama7b"], "Did you mean 'llama-7b'"),
        (["--dtype", "int8"], "There is no dtype 'int8' here"),
        (["--device", "toaster"], "has no device 'toaster'"),
        (["--params", "20M", "--context", "2000"], "do not fit the model's 2048 positions"),
        (["--params", "3M"], "too few"),
    ],
)
def test_refused_in_one_sentence(arguments, message, tmp_path):
    done = CliRunner().invoke(app, ["bench", "inflate", *arguments, "--out", str(tmp_path)])
    assert done.exit_code != 0
    assert message in str(done.exception)
