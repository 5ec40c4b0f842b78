"""`draftree generate` with BiLD and with encoder-decoders read from a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from generate_driver import noisy
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner
from zoo import build

from draftree.cli import app
from draftree.engine import generate

WORDS = "w5 w9 w40 w7 w61 w12 w33"


def told(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["generate", "--json", *arguments])
    assert done.exit_code == 0, done.output + str(done.exception)
    answer: dict[str, Any] = json.loads(done.output[done.output.index("{") :])
    return answer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A T5 and a small one for it, with a tokenizer of 97 words."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2")
    made = []
    for name, model in (("large", build("t5")), ("small", noisy("t5"))):
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        made.append(folder)
    return made[0], made[1]


def test_the_embedded_pair(demo: Any) -> None:
    question = ["--max-new-tokens", "24", "List the numbers from one to ten."]
    plain = told("--drafter", "none", *question)
    lossy = told("--bild", "demo", "--fallback-threshold", ".3", "--rollback-threshold", "5", *question)
    assert set(lossy["stats"]["accepted_by_source"]) == {"bild-lossy"}
    assert lossy["stats"]["calls_per_token"] < 1
    lossless = told("--bild", "demo", "--fallback-threshold", "0", "--lossless", *question)
    assert lossless["token_ids"] == plain["token_ids"]
    assert set(lossless["stats"]["accepted_by_source"]) == {"bild-lossless"}


@pytest.mark.filterwarnings("ignore:The small model is no smaller")
def test_encoder_decoders_from_a_folder(folders: tuple[Path, Path]) -> None:
    import torch

    large, small = map(str, folders)
    ids = torch.tensor([[5, 9, 40, 7, 61, 12, 33]])
    expected = generate(build("t5"), ids, max_new_tokens=8).sequences[0, 1:].tolist()
    shared = ["--model", large, "--max-new-tokens", "8", WORDS]
    assert told("--drafter", "none", *shared)["token_ids"] == expected
    for options in (
        ("--drafter", small),
        ("--bild", small, "--lossless", "--fallback-threshold", "0"),
        (
            "--bild",
            small,
            "--rollback-threshold",
            "0",
            "--fallback-threshold",
            "0.05",
        ),  # every difference is taken back
    ):
        answer = told(*options, *shared)
        assert answer["token_ids"] == expected
    free = told("--bild", small, "--rollback-threshold", "inf", "--fallback-threshold", "0", *shared)
    assert free["stats"]["steps"] == 2  # the first token, and one for the rest
    done = CliRunner().invoke(app, ["generate", "--bild", large, "hello"])
    assert "has another tokenizer than the large one" in str(done.exception)
