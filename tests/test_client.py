"""The client that resumes: an answer broken anywhere is finished as it would have been."""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from few import crossed
from serve_driver import Running, serving
from tokenizers.processors import TemplateProcessing

from benchmarks.machine.schemas import SCHEMAS
from draftree.client import Answer, Client, ServerError

CASES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_p": 0.9, "frequency_penalty": 0.8, "min_tokens": 30},
    {"temperature": 1.2, "seed": 7, "repetition_penalty": 1.2, "presence_penalty": 0.5, "ignore_eos": True},
    {"temperature": 0, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMAS["nested"]}}},
    {"temperature": 1.0, "seed": 8, "structured_outputs": {"regex": "[a-z ]{30,40}[.]"}},
]


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_an_answer_goes_on_from_any_token(server: Running, fields: dict[str, Any]) -> None:
    prompt = server.post("/tokenize", prompt="The sea is a wide thing").json()["tokens"]
    whole = server.complete(prompt, max_tokens=40, return_token_ids=True, **fields)["choices"][0]
    ids = whole["token_ids"]
    for done in (1, len(ids) // 2, len(ids) - 1):
        own = {"max_tokens": 40 - done, "draftree": {"resumed_tokens": done}, "return_token_ids": True}
        rest = server.complete([*prompt, *ids[:done]], **fields, **own)["choices"][0]
        assert rest["token_ids"] == ids[done:]
        assert whole["text"].endswith(rest["text"])
        assert rest["finish_reason"] == whole["finish_reason"]


@pytest.mark.parametrize("own", [{"min_new_tokens": 20}, {"exponential_decay_length_penalty": (12, 1.5)}], ids=str)
def test_lengths_of_the_model_s_own_count_from_where_the_answer_began(demo: Any, own: dict[str, Any]) -> None:
    model = copy.copy(demo.model)
    model.generation_config = copy.deepcopy(model.generation_config)
    model.generation_config.update(**own)
    asked = {"max_tokens": 30, "return_token_ids": True}
    if "min_new_tokens" in own:
        asked["logit_bias"] = {str(demo.tokenizer.eos_token_id): 100}
    prompt = demo.tokenizer("The sea").input_ids
    with serving(model, demo.tokenizer, None) as server:
        ids = server.complete(prompt, **asked)["choices"][0]["token_ids"]
        assert 10 < len(ids) < 30
        rest = asked | {"max_tokens": 22, "draftree": {"resumed_tokens": 8}}
        assert server.complete([*prompt, *ids[:8]], **rest)["choices"][0]["token_ids"] == ids[8:]


class Breaking(httpx.BaseTransport):
    """Breaks every stream after some bytes, or answers with status 503, until it has done so often enough."""

    def __init__(self, times: int) -> None:
        self.inner, self.rng, self.left = httpx.HTTPTransport(), random.Random(times), times

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path != "/v1/completions":
            return self.inner.handle_request(request)
        if self.left > 1 and self.rng.random() < 0.3:
            self.left -= 1
            return httpx.Response(503, json={"error": {"message": "The server is shutting down."}})
        response = self.inner.handle_request(request)
        if self.left:
            self.left -= 1
            response.stream = Cut(response.stream, self.rng.randrange(100, 900))
        return response


class Cut(httpx.SyncByteStream):
    def __init__(self, inner: Any, most: int) -> None:
        self.inner, self.most = inner, most

    def __iter__(self) -> Any:
        for chunk in self.inner:
            yield chunk[: self.most]
            self.most -= len(chunk)
            if self.most < 0:
                raise httpx.ReadError("the connection broke")

    def close(self) -> None:
        self.inner.close()


@pytest.mark.parametrize(("times", "fields"), crossed([1, 3, 8], CASES))
def test_broken_streams_change_nothing(server: Running, times: int, fields: dict[str, Any]) -> None:
    body = {"prompt": "The sea is a wide thing", "max_tokens": 60, "stop": ["of the s"]} | fields
    expected = server.complete(**body, return_token_ids=True)
    with Client([server.url, server.url]) as client:
        client._http = httpx.Client(transport=Breaking(times), timeout=20)
        answer = client.complete(**body)
    choice = expected["choices"][0]
    assert (answer.token_ids, answer.text) == (choice["token_ids"], choice["text"])
    assert answer.finish_reason == choice["finish_reason"]
    assert answer.resumed


def test_chats_and_pieces(server: Running) -> None:
    messages = [{"role": "user", "content": "Tell me about the sea."}]
    whole = server.post("/v1/chat/completions", messages=messages, temperature=0, max_tokens=30).json()
    with Client(server.url) as client:
        answer = Answer()
        pieces = list(client.stream(messages, answer, temperature=0, max_tokens=30))
    assert "".join(piece.text for piece in pieces) == answer.text == whole["choices"][0]["message"]["content"]
    assert [token for piece in pieces for token in piece.token_ids] == answer.token_ids


def test_what_is_refused_is_not_tried_again(server: Running) -> None:
    with Client(server.url) as client, pytest.raises(ValueError, match="temperature"):
        client.complete("Hi", temperature=-1)
    with Client(server.url) as client, pytest.raises(ValueError, match="max_tokens is 0"):
        client.complete([5, 6], max_tokens=0)
    with Client(server.url) as client, pytest.raises(ValueError, match="loosen one of them"):
        client.complete("Hi", structured_outputs={"regex": "[a-z]{1,9}"}, min_tokens=20)
    with Client("http://127.0.0.1:9", attempts=1) as client, pytest.raises(ServerError, match="No server answers"):
        client.complete([5, 6])
    with pytest.raises(ValueError, match="at least one URL"):
        Client([])


def test_what_a_client_that_resumes_cannot_give_is_refused_before_it_asks() -> None:
    with Client("http://127.0.0.1:9", attempts=1) as client:
        for fields in ({"n": 2}, {"best_of": 3}, {"echo": True}):
            with pytest.raises(ValueError, match=f"one answer, without its prompt: leave {next(iter(fields))} out"):
                client.stream("Hi", **fields)


def test_none_is_the_default(server: Running) -> None:
    asked = {"temperature": 0, "ignore_eos": True}
    with Client(server.url) as client:
        plain = client.complete("The sea", **asked)
        assert len(plain.token_ids) == 128
        told = client.complete("The sea", **asked, max_tokens=None, seed=None, stop=None, n=1, best_of=None, echo=False)
    assert told == plain


def test_a_text_is_read_with_special_tokens_or_without(demo: Any) -> None:
    tokenizer = copy.deepcopy(demo.tokenizer)
    single = TemplateProcessing(single="</s> $A", special_tokens=[("</s>", tokenizer.eos_token_id)])
    tokenizer.backend_tokenizer.post_processor = single
    with serving(demo.model, tokenizer, None) as server, Client(server.url) as client:
        for special in (True, False):
            asked = {"max_tokens": 8, "temperature": 0, "add_special_tokens": special}
            expected = server.complete("The sea", **asked)["choices"][0]["text"]
            assert client.complete("The sea", **asked).text == expected
        with pytest.raises(ValueError, match="the prompt is token ids: leave it out"):
            client.complete([5, 6], add_special_tokens=False)


@pytest.mark.parametrize("sign", ["\u2028", "\u2029", "\x85"])
def test_line_ends_of_other_kinds_are_text(server: Running, sign: str) -> None:
    with Client(server.url) as client:
        assert client.complete("Hi", structured_outputs={"choice": [f"a{sign}b"]}).text == f"a{sign}b"


def test_a_stream_that_ends_within_an_event_is_resumed() -> None:
    a, b = (
        json.dumps({"choices": [{"text": text, "token_ids": [token], "finish_reason": end}]})
        for text, token, end in (("a", 5, None), ("b", 6, "stop"))
    )
    texts = (f"data: {a}\r\n\r\ndata: {b[:20]}", f"data: {b}\n\ndata: [DONE]\n\n")
    streams = [httpx.Response(200, text=text) for text in texts]
    with Client("http://server") as client:
        client._http = httpx.Client(transport=httpx.MockTransport(lambda _: streams.pop(0)))
        assert client.complete([5]) == Answer("ab", [5, 6], "stop", 1)


def start(log: Path) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "draftree", "serve", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log.open("w"), text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    return process, line.split(" at ")[1].split("/v1")[0]


@pytest.mark.slow
def test_a_killed_server_loses_no_answer(server: Running, tmp_path: Path) -> None:
    """One of two servers is killed in the middle of a stream; the other one finishes it."""
    expected = server.complete("The sea", max_tokens=1500, ignore_eos=True, temperature=1.0, seed=3)
    servers = [start(tmp_path / f"{i}.log") for i in range(2)]
    try:
        with Client([url for _, url in servers]) as client:
            answer = Answer()
            for n, _ in enumerate(client.stream("The sea", answer, max_tokens=1500, ignore_eos=True, seed=3)):
                if n == 20:
                    victim = servers[client._next % 2][0]
                    os.kill(victim.pid, signal.SIGKILL)
                    time.sleep(0.1)
        assert answer.text == expected["choices"][0]["text"]
        assert answer.resumed == 1
    finally:
        for process, _ in servers:
            process.kill()
