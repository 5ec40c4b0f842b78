"""Replicas without Ray: routing by the beginnings of texts, and failed replicas."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import zoo
from typer.testing import CliRunner

from draftree.checkpoints import Placement
from draftree.cli import app as cli
from draftree.integrations import ray_serve
from draftree.integrations.ray_serve import app, deployment
from draftree.integrations.ray_serve.front import (
    MOST_PARTS,
    Front,
    Prefixes,
    beginnings_of,
    labelled,
)
from draftree.serve.app import Launch
from draftree.serve.settings import ServerSettings

LONG = "All of this is the beginning of a text that is rather longer than two of the blocks that are compared. " * 2


def chat(*contents: Any, **fields: Any) -> bytes:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return json.dumps({"messages": messages, **fields}).encode()


def text(prompt: Any) -> bytes:
    return json.dumps({"prompt": prompt}).encode()


def test_a_later_turn_begins_with_the_earlier_one() -> None:
    first, second = beginnings_of(chat("Hi")), beginnings_of(chat("Hi", LONG, "And?"))
    assert len(second) == 3
    assert second[:1] == first
    others = [chat("Ho"), chat("Hi", user="other"), json.dumps({"prompt": "Hi"}).encode()]
    assert not any(set(first) & set(beginnings_of(other)) for other in others)
    assert not set(first) & set(beginnings_of(chat("Hi"), b"Bearer other"))


def test_items_of_responses() -> None:
    items = [{"role": "user", "content": "Hi"}, *({"type": "function_call", "name": name} for name in ("look", "go"))]
    first, *later = (beginnings_of(json.dumps({"input": items[:n]}).encode()) for n in (1, 2, 3))
    assert [len(found) for found in later] == [2, 3]
    assert later[1][:2] == later[0]
    assert first == later[0][:1]
    assert len(set(later[1])) == 3
    assert beginnings_of(json.dumps({"input": LONG}).encode()) == beginnings_of(text(LONG))


def test_a_system_prompt_is_not_a_beginning() -> None:
    def asked(question: str) -> bytes:
        system = {"role": "system", "content": LONG}
        return json.dumps({"messages": [system, {"role": "user", "content": question}]}).encode()

    assert len(beginnings_of(asked("Hi"))) == 1
    assert beginnings_of(asked("Hi")) != beginnings_of(asked("Ho"))


def test_prompts_are_hashed_by_blocks() -> None:
    prefixes, known = Prefixes(), beginnings_of(text(LONG))
    assert len(known) == len(LONG) // 64 == 3
    prefixes.add(known, "a")
    assert prefixes.find(beginnings_of(text(LONG[:64] + "x" * 64)), {"a"}) == "a"
    assert prefixes.find(beginnings_of(text("x" + LONG)), {"a"}) is None
    assert len(beginnings_of(text(LONG * 100))) == MOST_PARTS
    assert beginnings_of(text(list(range(200))))


@pytest.mark.parametrize(
    "body", [b"", b"\xff", b"[]", b'"x"', b"{}", b'{"messages": 3}', b'{"messages": [{"role": 1}]}', b"[" * 3000]
)
def test_other_bodies_have_no_beginnings(body: bytes) -> None:
    assert len(beginnings_of(body)) == (1 if b"role" in body else 0)


def test_the_replica_of_the_longest_beginning_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes = Prefixes()
    for hashes, replica in (([1, 2], "a"), ([1, 2, 3], "b"), ([1, 9], "a")):
        prefixes.add(hashes, replica)
    assert prefixes.find([1, 2, 3, 4], {"a", "b"}) == "b"
    assert prefixes.find([1, 9, 5], {"a", "b"}) == "a"
    assert prefixes.find([1, 2, 3], {"a"}) == "a"
    assert prefixes.find([7], {"a", "b"}) is prefixes.find([], {"a", "b"}) is None
    monkeypatch.setattr("draftree.integrations.ray_serve.front.MOST_KNOWN", 2)
    prefixes.add([5], "a")
    assert prefixes.find([2], {"a", "b"}) is None
    assert prefixes.find([9], {"a", "b"}) == "a"


class DiedError(Exception):
    """Stand for Ray's error."""


START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
WHOLE = START | {"headers": [(b"content-type", b"application/json")]}


def body(text: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text, "more_body": more}


class Replicas:
    """Stand for a handle: call i of `answer` yields the i-th script and raises its exceptions."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts, self.calls, self.cancelled, self.count = list(scripts), [], 0, 2
        self.answer = self.about = self

    def options(self, *, stream: bool) -> Replicas:
        return self

    def remote(self, *arguments: Any, **named: Any) -> Any:
        self.calls.append((arguments, named))
        if not arguments:  # about
            number = named["replica"] % self.count
            text = f'# TYPE a_total counter\n# HELP a_total Some.\na_total{{b="c\\"d"}} {number}\n'
            return asyncio.sleep(0, {"name": f"r{number}", "metrics": text})
        return Response(self, self.scripts.pop(0))


class Response:
    def __init__(self, replicas: Replicas, script: list[Any]) -> None:
        self.replicas, self.script = replicas, script

    async def __aiter__(self) -> AsyncIterator[Any]:
        for message in self.script:
            if isinstance(message, Exception):
                raise message
            if message is None:
                await asyncio.sleep(3600)
            yield message

    def cancel(self) -> None:
        self.replicas.cancelled += 1


def ask(
    replicas: Replicas,
    path: str = "/v1/completions",
    sent: bytes = b"{}",
    *,
    leave: bool = False,
    more: bool = False,
    **settings: Any,
) -> list[Any]:
    """Return the messages that a client of the front gets; it may leave after two, or have more to send."""
    got: list[Any] = []
    left = asyncio.Event()

    async def run() -> None:
        read = False

        async def receive() -> Any:
            nonlocal read
            if not read:
                read = True
                return {"type": "http.request", "body": sent, "more_body": more}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            got.append(message)
            if leave and len(got) == 2:
                left.set()

        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
        front = Front(replicas, ServerSettings(max_body_bytes=1000, body_seconds=0.05, **settings))  # type: ignore[arg-type]
        await asyncio.wait_for(front(scope, receive, send), 10)
        await asyncio.sleep(0.01)

    asyncio.run(run())
    return got


def test_another_replica_answers_if_one_fails_before_its_response() -> None:
    replicas = Replicas([DiedError()], [START, body(b"x")])
    assert ask(replicas, sent=chat(LONG)) == [START, body(b"x")]
    assert replicas.calls[0][1]["text"] == beginnings_of(chat(LONG))
    found = ask(Replicas([DiedError()], [DiedError()]))
    assert found[0]["status"] == 503
    assert (b"retry-after", b"1") in found[0]["headers"]
    assert json.loads(found[1]["body"])["error"]["code"] == "replica_failed"


def test_a_stream_that_breaks_ends_with_a_clear_error() -> None:
    found = ask(Replicas([START, body(b"data: {}\n\n", more=True), DiedError()]))
    assert found[:2] == [START, body(b"data: {}\n\n", more=True)]
    assert not found[2]["more_body"]
    event = json.loads(found[2]["body"].removeprefix(b"data: "))
    assert "has failed" in event["error"]["message"]
    with pytest.raises(DiedError):
        ask(Replicas([WHOLE, body(b"{", more=True), DiedError()]))


def test_a_client_that_disconnects_ends_the_response() -> None:
    replicas = Replicas([START, body(b"x", more=True), None])
    assert len(ask(replicas, leave=True)) == 2
    assert replicas.cancelled == 1


def test_a_corpus_reaches_all_replicas() -> None:
    replicas = Replicas([WHOLE, body(b"0")], [WHOLE, body(b"1")])
    assert ask(replicas, "/v1/corpus")[0]["status"] == 200
    assert [named["replica"] for arguments, named in replicas.calls if arguments] == [0, 1]
    found = ask(Replicas([WHOLE, body(b"0")], [WHOLE | {"status": 400}, body(b"no")]), "/v1/corpus")
    assert found == [WHOLE | {"status": 400}, body(b"no")]


def test_metrics_have_the_label_replica() -> None:
    found = ask(Replicas(), "/metrics")
    lines = found[1]["body"].decode().splitlines()
    assert [line for line in lines if line[0] != "#"] == [
        'a_total{b="c\\"d",replica="r0"} 0.0',
        'a_total{b="c\\"d",replica="r1"} 1.0',
    ]
    assert [line for line in lines if line.startswith("# TYPE")] == ["# TYPE a_total counter"]
    assert ask(Replicas(), "/metrics", api_keys=("key",))[0]["status"] == 401
    assert labelled({}) == b""


def test_the_front_limits_bodies() -> None:
    for sent, status in ((b"{", 408), (b"x" * 5000, 413)):
        found = ask(Replicas(), sent=sent, more=True)
        assert found[0]["status"] == status
        assert json.loads(found[1]["body"])["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"modle": "x"}, "no argument 'modle'"),
        ({"drafter": "lookahed"}, "lookahead"),
        ({"slots": "many"}, "slots is 'many'"),
        ({"slots": "0"}, "slots is 0"),
        ({"replicas": "two"}, "replicas is 'two'"),
        ({"share": "perhaps"}, "share is 'perhaps': Input should be a valid boolean"),
        ({"device": "cuda:9"}, "no device 'cuda:9'"),
        ({"gpus": "all"}, "gpus is 'all': Input should be a valid number"),
    ],
)
def test_wrong_arguments_of_a_deployment_are_refused(arguments: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        app(arguments)


def test_a_deployment_has_the_settings_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_serve, "deployment", lambda launch, **options: launch.settings)
    assert not app({}).share
    assert app({"share": "true"}).share
    assert app({"api_keys": "one, two ,three"}).api_keys == ("one", "two", "three")
    monkeypatch.setenv("DRAFTREE_API_KEYS", "four, ")
    assert app({"api_keys": "one"}).api_keys == ("one", "four")
    with pytest.raises(ValueError, match="empty"):
        app({"api_keys": ""})
    assert app({"max_choices": 3, "max_body_bytes": "999"}).max_body_bytes == 999


def test_devices_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_serve, "deployment", lambda launch, **options: (launch, options))
    launch, options = app({"device": "cpu", "dtype": "bfloat16", "strict": "true"})
    assert launch.placement == Placement("cpu", "bfloat16")
    assert launch.strict
    assert options["gpus"] == 0
    launch, options = app({"device": "cuda", "gpus": "0.5"})  # of other machines
    assert launch.placement == Placement("cuda")
    assert options["gpus"] == 0.5


def test_impossible_deployments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch(None, dict)
    monkeypatch.setattr(ray_serve, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="Replicas need Ray"):
        deployment(launch)
    monkeypatch.setattr(ray_serve, "find_spec", lambda name: name)
    with pytest.raises(ValueError, match="most_replicas is 2: give at least 3"):
        deployment(launch, replicas=3, most_replicas=2)
    with pytest.raises(ValueError, match="gpus is -1"):
        deployment(launch, gpus=-1.0)
    with pytest.raises(ValueError, match="device is 'cuda', and Ray shows replicas without gpus none"):
        deployment(Launch(None, dict, placement=Placement("cuda")))


def test_an_empty_key_is_refused() -> None:
    done = CliRunner().invoke(cli, ["serve", "--api-key", ""])
    assert "empty" in str(done.exception)


@pytest.mark.parametrize("option", [["--most-replicas", "3"], ["--gpus", "1"]])
def test_options_of_replicas_need_replicas(option: list[str]) -> None:
    done = CliRunner().invoke(cli, ["serve", *option])
    assert f"{option[0]} is for replicas" in str(done.exception)


def test_the_launch_is_checked_before_replicas_start(demo: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(ray_serve, "deployment", lambda launch, **options: (launch, options))
    monkeypatch.setattr(ray_serve, "run", lambda application, *where: started.append((application, where)))
    zoo.build("llama").save_pretrained(tmp_path)
    demo.tokenizer.save_pretrained(tmp_path)
    asked = ["serve", "--replicas", "2", "--port", "0", "--threads", "1"]
    wrong = CliRunner().invoke(cli, [*asked, "--model", str(tmp_path), "--drafter", "medusa"])
    assert wrong.exit_code != 0
    assert "was trained for" in str(wrong.exception)
    assert not started
    right = CliRunner().invoke(cli, asked)
    assert right.exit_code == 0, right.output
    ((launch, options), where) = started[0]
    assert launch.threads == 1
    assert options == {"replicas": 2, "most_replicas": None, "gpus": 0.0}
    assert launch.placement.device == "cpu", "Ray shows them no GPU"
    assert where[:2] == ("127.0.0.1", 0)
    assert CliRunner().invoke(cli, ["serve", "--replicas", "0"]).exit_code == 2


@pytest.mark.parametrize("path", ["/metrics", "/v1/corpus"])
def test_a_failed_replica_is_reported_by_routes_to_all(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def dies(_: Front) -> AsyncIterator[Any]:
        raise DiedError
        yield

    monkeypatch.setattr(Front, "_running", dies)
    begin, end = ask(Replicas([WHOLE, body(b"")]), path)
    assert begin["status"] == 503
    assert json.loads(end["body"])["error"]["code"] == "replica_failed"
