"""A dialogue: every answer is what `generate` gives for the turns so far, and nothing is read twice; the terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig, StoppingCriteria
from typer.testing import CliRunner
from zoo import build

import draftree
from draftree import Chat, Lookahead
from draftree.cli import app

TURNS = ("Tell me about the sea.", "And what about the sky?", "Tell me about the sea.")


def expected(demo: Any, messages: list[dict[str, str]], **options: Any) -> str:
    inputs = demo.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    found = draftree.generate(demo.model, **inputs, max_new_tokens=40, **options).sequences
    return str(demo.tokenizer.decode(found[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.mark.parametrize("drawn", [{}, {"do_sample": True, "temperature": 0.9, "top_p": 0.9}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("drafter", [None, Lookahead])
def test_answers_are_those_of_generate(demo: Any, drafter: Any, drawn: dict[str, Any]) -> None:
    made = None if drafter is None else drafter()
    with Chat(demo.model, demo.tokenizer, made, system="Be kind.", max_new_tokens=40, seed=3, **drawn) as chat:
        messages = [{"role": "system", "content": "Be kind."}]
        for turn, text in enumerate(TURNS):
            answer = "".join(chat.send(text))
            messages.append({"role": "user", "content": text})
            assert answer == expected(demo, messages, **drawn, **({"seed": 3 + turn} if drawn else {}))
            messages.append({"role": "assistant", "content": answer})
            assert chat.messages == messages
        assert len(chat.stats().requests) == 3
        assert chat.requests[1].reused > len(chat.requests[0].context.tokens) - 45, "the first turn is not read again"


def test_answers_that_are_over_keep_no_cache_of_guidance(demo: Any) -> None:
    with Chat(demo.model, demo.tokenizer, max_new_tokens=6, guidance_scale=1.4) as chat:
        for text in TURNS:
            list(chat.send(text))
        guides = [request.params.processors[0] for request in chat.requests]
        assert [guide.unconditional_context for guide in guides] == [None] * 3
        assert all(request.context.chooser is None for request in chat.requests)


def test_a_broken_answer_stays_as_far_as_it_came(demo: Any) -> None:
    with Chat(demo.model, demo.tokenizer, Lookahead(), max_new_tokens=40) as chat:
        stream = chat.send(TURNS[0])
        said = next(stream) + next(stream)
        stream.close()
        held = chat.messages[-1]["content"]
        assert held.startswith(said)
        assert "".join(chat.send(TURNS[1])) == expected(demo, chat.messages[:-1])
        chat.reset()
        assert "".join(chat.send(TURNS[0])) == expected(demo, [{"role": "user", "content": TURNS[0]}])


class Interrupted(StoppingCriteria):
    """Ctrl-C in the midst of a step, behind 9 tokens."""

    left = 9

    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return False


@pytest.mark.parametrize("drafter", [None, Lookahead])
def test_ctrl_c_keeps_what_has_come(demo: Any, drafter: Any) -> None:
    made = None if drafter is None else drafter()
    with Chat(demo.model, demo.tokenizer, made, max_new_tokens=40, stopping_criteria=[Interrupted()]) as chat:
        said = []
        with pytest.raises(KeyboardInterrupt):
            said.extend(chat.send(TURNS[0]))
        asked, answered = chat.messages
        assert asked["content"] == TURNS[0]
        assert answered["content"] == demo.tokenizer.decode(chat.requests[0].tokens, skip_special_tokens=True) != ""
        assert "".join(chat.send(TURNS[1])) == expected(demo, chat.messages[:-1])


def test_a_dialogue_that_is_reset_or_overlapped(demo: Any) -> None:
    with Chat(demo.model, demo.tokenizer, max_new_tokens=40) as chat:
        first = chat.send(TURNS[0])
        next(first)
        with pytest.raises(ValueError, match="An answer is still under way"):
            next(chat.send(TURNS[1]))
        chat.reset()
        first.close()
        assert chat.messages == []
        failing = Chat(demo.model, demo.tokenizer, max_new_tokens=4, stopping_criteria=[Failing()])
        with pytest.raises(RuntimeError, match="on purpose"):
            "".join(failing.send(TURNS[0]))
        assert failing.messages == []


class Failing(StoppingCriteria):
    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        raise RuntimeError("on purpose")


def test_a_turn_without_drafting(demo: Any) -> None:
    with Chat(demo.model, demo.tokenizer, Lookahead(), max_new_tokens=40) as chat:
        first = "".join(chat.send(TURNS[0]))
        chat.reset()
        assert "".join(chat.send(TURNS[0], drafting=False)) == first
        assert chat.requests[1].stats.drafted == 0 < chat.requests[0].stats.drafted


def test_what_cannot_be_said_changes_nothing(demo: Any) -> None:
    with Chat(demo.model, demo.tokenizer, max_new_tokens=40) as chat:
        "".join(chat.send(TURNS[0]))
        before = list(chat.messages)
        for text, message in ((" ", "message is blank"), ("word " * 3000, "the model reads 2048: reset it")):
            with pytest.raises(ValueError, match=message):
                "".join(chat.send(text))
            assert chat.messages == before
        with pytest.raises(TypeError, match="text is a int"):
            "".join(chat.send(5))  # type: ignore[arg-type]
        assert chat.messages == before
        long = "".join(chat.send("word " * 1950))
        assert len(demo.tokenizer(long).input_ids) <= 40, "an answer ends where the context does"


def test_who_cannot_talk(demo: Any) -> None:
    class Mute:
        chat_template = None

    with pytest.raises(ValueError, match="no chat template"):
        Chat(demo.model, Mute())
    with pytest.raises(ValueError, match="decoder-only"):
        Chat(build("t5"), demo.tokenizer)
    with pytest.raises(TypeError, match="temperatur"):
        Chat(demo.model, demo.tokenizer, temperatur=1)
    with pytest.raises(ValueError, match="one request has one answer"):
        Chat(demo.model, demo.tokenizer, do_sample=True, num_return_sequences=2)
    with pytest.raises(TypeError, match="seed is 'one'"):
        Chat(demo.model, demo.tokenizer, seed="one")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give max_new_tokens"):
        Chat(demo.model, demo.tokenizer, max_length=3)
    with pytest.raises(ValueError, match="sets max_new_tokens: give it to Chat instead"):
        Chat(demo.model, demo.tokenizer, generation_config=GenerationConfig(max_new_tokens=5))


# ------------------------------------------------------------------------------------------ the terminal


def talked(lines: list[str], *arguments: str) -> Any:
    return CliRunner().invoke(app, ["chat", "--max-new-tokens", "12", *arguments], input="\n".join([*lines, ""]))


def test_commands_of_the_terminal(demo: Any, tmp_path: Path) -> None:
    trie = tmp_path / "kept.trie"
    lines = ["Hi", "/stats", "/plain", "Hi", "/plain", "/nothing", "", "/reset", "Hi", "/exit", "x"]
    done = talked(lines, "--trie", str(trie))
    assert done.exit_code == 0, done.output
    for told in (" passes for ", "Drafting is off", "Drafting is on", "no command '/nothing'", "New dialogue"):
        assert told in done.output
    assert trie.is_file()
    answer = "".join(Chat(demo.model, demo.tokenizer, max_new_tokens=12).send("Hi"))
    assert done.output.count(answer.strip()) >= 2
    again = talked(["Hi"], "--trie", str(trie), "--drafter", "lookahead+prompt-lookup")
    assert again.exit_code == 0
    assert answer.strip() in again.output


def test_a_full_context_is_said_and_the_chat_goes_on() -> None:
    done = talked(["word " * 3000, "Hi"])
    assert done.exit_code == 0
    assert "the model reads 2048" in done.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--temperature", "2"], "add --sample"),
        (["--device", "gpu"], "no device 'gpu'"),
        (["--drafter", "lokahead"], "Did you mean 'lookahead'"),
    ],
)
def test_wrong_options(arguments: list[str], told: str) -> None:
    done = talked(["Hi"], *arguments)
    assert done.exit_code != 0
    assert told in str(done.exception)


@pytest.mark.parametrize("option", ["--bild", "--early-head", "--lossless", "--raw"])
def test_what_a_chat_has_not_is_no_option(option: str) -> None:
    said = talked(["Hi"], option).output
    assert "No such option" in said  # and behind it the option, as the version of click writes it
    assert option in said


def test_in_a_terminal() -> None:
    """Ctrl-C ends an answer and never the chat, Ctrl-D ends the chat."""
    process, terminal = pty.fork()
    if process == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # what runs in the background may have it ignored
        os.environ |= {"TERM": "dumb", "OMP_NUM_THREADS": "1"}
        command = ["chat", "--max-new-tokens", "1900", "--drafter", "none"]
        os.execv(sys.executable, [sys.executable, "-m", "draftree", *command])
    seen = ""

    def read_until(come: Callable[[str], bool], seconds: float = 60.0) -> None:
        nonlocal seen
        seen, last = "", time.monotonic() + seconds
        while not come(seen):
            assert time.monotonic() < last, seen
            if select.select([terminal], [], [], 0.1)[0]:
                seen += os.read(terminal, 4096).decode(errors="replace")

    asked = "Tell me about the sea."
    read_until(lambda text: text.endswith("> "))
    os.write(terminal, f"{asked}\n".encode())
    read_until(lambda text: len(text.partition(asked)[2]) > 20)  # the answer has begun
    os.kill(process, signal.SIGINT)
    read_until(lambda text: text.endswith("> "))
    assert " ..." in seen
    time.sleep(1)  # a signal between the prompt and the wait for what is typed is only seen at the next key
    os.kill(process, signal.SIGINT)
    read_until(lambda text: "Ctrl-D or /exit leaves." in text and text.endswith("> "))
    os.write(terminal, b"\x04")
    assert os.waitpid(process, 0)[1] == 0


def test_ctrl_c_keeps_what_a_trie_has_learned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []

    def interrupted(console: Any, piece: str, style: str = "") -> None:
        said.append(piece)
        if len(said) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr("draftree.cli.screen.print_answer", interrupted)
    trie = tmp_path / "kept.trie"
    done = CliRunner().invoke(app, ["generate", "--trie", str(trie), "Tell me about the sea."])
    assert done.exit_code != 0
    assert trie.is_file()
