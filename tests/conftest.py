"""Settings for every test: no network, one thread, and one embedded model for the whole run."""

from __future__ import annotations

import os

# Before transformers is imported anywhere, as the hub client reads it once at import.
os.environ["HF_HUB_OFFLINE"] = "1"
# The tests' models are tiny, and a second OpenMP thread waits whole time slices wherever another process is busy.
# Set here, it also holds for the commands that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Commands without --model answer with the embedded model, whatever is installed.
os.environ["DRAFTREE_MODEL"] = "embedded"

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Demo(NamedTuple):
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def pytest_configure(config: pytest.Config) -> None:
    """Not in the process that only hands tests out to workers: importing torch and transformers takes it seconds."""
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_collection_finish() -> None:
    """What was imported stays: without looking through it a collection of garbage is several times as fast.

    What tests leave behind is small, and is looked for less often than usual, which takes a twentieth of their time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 50)


@pytest.fixture(scope="session")
def demo() -> Demo:
    """The embedded model and tokenizer, shared by all tests: leave both as they are."""
    import draftree

    return Demo(*draftree.demo_model())


@pytest.fixture(scope="session")
def hybrid() -> Demo:
    """The package's model with recurrent layers, shared by all tests: leave it as it is."""
    import draftree

    return Demo(*draftree.load_model("chat-hybrid"))


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Sequence[str], str], None]:
    """Gives a command's arguments to `draftree`, and holds it to one sentence with these words and exit status 2."""
    from draftree.cli import main

    def check(arguments: Sequence[str], words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["draftree", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        said = capsys.readouterr()
        assert stopped.value.code == 2
        assert said.out == ""
        assert words in " ".join(said.err.replace("│", " ").split())
        assert "Traceback" not in said.err
        assert "\x1b" not in said.err

    return check


@pytest.fixture(scope="module")
def server(demo: Demo) -> Iterator[Any]:
    """The embedded model behind the API, with Lookahead; see `serve_driver.Running`.

    Its trees have one size: on a machine that is busy for a moment those sized by cost may draft nothing at all.
    """
    from serve_driver import serving

    from draftree.shaping import Fixed

    with serving(*demo, shape=Fixed(8)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Any) -> Any:
    """OpenAI's own client of `server`."""
    import openai

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
