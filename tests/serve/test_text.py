"""Text of tokens: whole characters, held-back stop strings, tool calls and reasoning; prompts of chats."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve_driver import MESSAGES, Running, serving
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from tool_chat import RESPONSE, TOOL, Talker
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftree.detokenizer import Detokenizer
from draftree.engine import Emitted, SamplingParams
from draftree.models import encode_prompt
from draftree.serve.chat import MessageReader, chat_prompt, tools_of
from draftree.serve.output import Delta, OutputStream, RequestOutput, StopStrings, TokenBytes, token_text
from draftree.serve.protocol import Chat, Completion, Message
from draftree.serve.responses import Call, events
from draftree.serve.settings import ApiError


class Slow:
    """Stand for a slow tokenizer, which has `decode` only."""

    is_fast = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def decode(self, ids: Any, **options: Any) -> str:
        return str(self._tokenizer.decode(ids, **options))


@pytest.mark.parametrize("fast", [True, False])
def test_pieces_join_to_the_whole_text(demo: Any, fast: bool) -> None:
    rng, tokenizer = random.Random(0), demo.tokenizer
    texts = ["Grüße aus Köln, 你好 🙂 — naïve", "\n\n  code:\n\tx = 1", "", "e\u0301", "plain words only"]
    rows = [tokenizer(text).input_ids for text in texts]
    rows += [[rng.randrange(4090) for _ in range(40)] for _ in range(20)]
    for ids in rows:
        detokenizer = Detokenizer(tokenizer if fast else Slow(tokenizer))
        pieces = [detokenizer.feed(token) for token in ids]
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        assert whole.startswith("".join(pieces))
        assert "".join(pieces) + detokenizer.rest() == whole


def test_invalid_bytes() -> None:
    """Llama 2's tokenizer has tokens for single bytes; passed-on text does not change."""
    vocabulary = {"<unk>": 0, **{f"<0x{i:02X}>": i + 1 for i in range(256)}, "a": 257, "▁b": 258}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.decoder = decoders.Sequence([made.decoder, decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    for text, expected in (
        (b"\n\xc3ab", ["\n", "", "\ufffda", " b", ""]),
        (b"\xe2\x82\xac\xe2ab", ["", "", "€", "", "\ufffda", " b", ""]),
        (b"a\xc3\xa9\xc3", ["a", "", "é", "", "\ufffd"]),
        (b"b\xc3\xa9a", ["b", "", "é", "a", ""]),
    ):
        for one in (tokenizer, Slow(tokenizer)):
            detokenizer = Detokenizer(one)
            ids = [257 + b"ab".index(byte) if byte in b"ab" else byte + 1 for byte in text]
            assert [*map(detokenizer.feed, ids), detokenizer.rest()] == expected
        assert bytes(byte for token in ids for byte in TokenBytes(tokenizer).of(token)).replace(b" ", b"") == text


def test_texts_of_single_tokens_have_their_space() -> None:
    """Decoders such as Llama 2's drop the space at the beginning of a text."""
    vocabulary = {"<unk>": 0, "▁the": 1, "the": 2}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    assert [token_text(tokenizer, token) for token in (1, 2)] == [" the", "the"]
    assert bytes(TokenBytes(tokenizer).of(1)) == b" the"


def test_a_completion_continues_the_text_of_its_prompt() -> None:
    """Llama 2's tokenizer adds a BOS, and its decoder drops a first space."""
    words = ["the", "cat", "sat"]
    vocabulary = ["<unk>", "<s>", "</s>", *(f"▁{word}" for word in words)]
    made = Tokenizer(models.Unigram([(word, -1.0) for word in vocabulary], unk_id=0))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}
    config = LlamaConfig(hidden_size=16, intermediate_size=16, vocab_size=len(vocabulary), **shape)
    asked: dict[str, Any] = {"max_tokens": 2, "logit_bias": {"5": 100}}
    with serving(LlamaForCausalLM(config).eval(), tokenizer) as server:
        for prompt in ("the cat", [1, 3, 4], "the"):
            assert server.complete(prompt, **asked)["choices"][0]["text"] == " sat sat"
        assert server.complete([1], **asked)["choices"][0]["text"] == "sat sat"
        scored = server.complete("the cat", **asked, echo=True, logprobs=0)["choices"][0]
        assert scored["text"] == server.complete("the cat", **asked, echo=True)["choices"][0]["text"]
        assert scored["text"] == "the cat sat sat"
        assert scored["logprobs"]["text_offset"] == [0, 0, 3, 7, 11]
        assert server.complete([1, 3], **asked, echo=True)["choices"][0]["text"] == "<s> the sat sat"


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Return the text that can be passed on, and the stop string that ended it."""
    places = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
    if places:
        at, _, found = min(places)
        return text[:at], found
    held = [n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])]
    return text[: len(text) - max(held, default=0)], None


@given(st.lists(st.text("ab", max_size=5), max_size=12), st.lists(st.text("ab", min_size=1, max_size=7), max_size=4))
def test_stop_strings_equal_a_naive_search(pieces: list[str], stops: list[str]) -> None:
    cutter, given_out, text = StopStrings(stops), "", ""
    for piece in pieces:
        given_out, text = given_out + cutter.feed(piece), text + piece
        assert (given_out, cutter.found) == naive(text, stops)
        if cutter.found is not None:
            return
    assert given_out + cutter.rest() == text


@given(st.lists(st.text("ab", max_size=3), max_size=12), STOPS, st.integers(0, 12))
def test_early_stop_strings_are_text(pieces: list[str], stops: list[str], least: int) -> None:
    cutter, given_out, text = StopStrings(stops), "", ""
    for number, piece in enumerate(pieces):
        given_out += cutter.feed(piece, may_end=number >= least)
        ends = [len(text) + n for n in range(1, len(piece) + 1) if number >= least]
        text += piece
        starts = [end - len(stop) for stop in stops for end in ends if text[:end].endswith(stop)]
        assert (cutter.found is None) == (not starts)
        if starts:
            assert given_out == text[: min(starts)]
            return
    assert given_out + cutter.rest() == text


SAID = '<think>Let me see.</think>Looking.<call>{"name": "look", "arguments": {"at": "sea"}}</call>'


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_tool_calls_and_reasoning_are_read_from_a_stream(size: int) -> None:
    reader = MessageReader(Talker(), [ord(c) for c in "user: Hi\nA: "], [TOOL])
    content, reasoning, calls = "", "", []
    for at in range(0, len(SAID), size):
        read = reader.feed(SAID[at : at + size], last=at + size >= len(SAID))
        content, reasoning, calls = content + read.content, reasoning + read.reasoning, calls + read.calls
    assert (content, reasoning) == ("Looking.", "Let me see.")
    assert [call["function"] for call in calls] == [{"name": "look", "arguments": '{"at": "sea"}'}]
    assert calls[0]["id"].startswith("call_")
    assert reader.calls == 1


BROKEN = [
    "<call>not json</call>",
    "<call></call>",
    '<call>{"name": "look"}</call>',
    '<call>{"arguments": {}}</call>',
    '<call>{"name": "look", "arguments": [1]}</call>',
    "<call>[1]</call>",
    '<call>{"name": "look", "argum',
    "<call>",
]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("broken", BROKEN)
def test_malformed_calls_become_content(broken: str, size: int) -> None:
    """No text is lost, and later calls are parsed."""
    whole = SAID.partition("Looking.")[2]
    text = f"<think>Hm.</think>Well: {broken}" + (f" And {whole} so." if broken.endswith("</call>") else "")
    reader = MessageReader(Talker(), [ord(c) for c in "user: Hi\nA: "], [TOOL])
    content, calls = "", []
    for at in range(0, len(text), size):
        read = reader.feed(text[at : at + size], last=at + size >= len(text))
        content, calls = content + read.content, calls + read.calls
    assert content == text.removeprefix("<think>Hm.</think>").replace(whole, "")
    assert len(calls) == reader.calls == text.count(whole)


def test_required_fields_of_a_template_may_be_missing() -> None:
    """An answer may end within its reasoning."""
    talker = Talker()
    fields: Any = RESPONSE["fields"]
    talker.response_template = RESPONSE | {"fields": fields | {"content": {"optional": False}}}
    reader = MessageReader(talker, [ord(c) for c in "user: Hi\nA: "], [])
    assert reader.feed("<think>Let me", last=True).reasoning == "Let me"


def test_a_call_begun_in_the_prompt() -> None:
    reader = MessageReader(Talker(), [ord(c) for c in 'user: Hi\nA: <call>{"name"'], [TOOL])
    assert reader.feed(": no</call> Well.", last=True).content == ": no</call> Well."


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_blanks_at_the_end_of_the_prompt_are_not_content(size: int) -> None:
    """Qwen 3 without thinking has markers that may begin with blanks."""
    talker, text = Talker(), "\n\nWell. <call>"
    fields: Any = RESPONSE["fields"]
    calls = fields["tool_calls"] | {"open_pattern": r"\s*<call>"}
    del calls["open"]
    talker.response_template = RESPONSE | {"fields": fields | {"tool_calls": calls}}
    reader = MessageReader(talker, [ord(c) for c in "user: Hi\nA: <think></think>\n\n"], [TOOL])
    pieces = [reader.feed(text[at : at + size], last=at + size >= len(text)) for at in range(0, len(text), size)]
    assert "".join(piece.content for piece in pieces) == "Well. <call>"


def chat(**fields: Any) -> Chat:
    return Chat.model_validate({"messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL]} | fields)


def test_tools_need_templates(demo: Any) -> None:
    assert tools_of(chat(), Talker()) == [TOOL]
    assert tools_of(chat(tool_choice="none"), Talker()) == []
    with pytest.raises(ApiError, match="knows no tools"):
        tools_of(chat(), demo.tokenizer)
    mute = Talker()
    mute.response_template = None  # type: ignore[assignment]
    with pytest.raises(ApiError, match="does not know how the model writes tool calls"):
        tools_of(chat(), mute)


def test_messages_for_templates(demo: Any) -> None:
    said = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]},
    ]
    messages = [Message.model_validate(m) for m in said]
    plain = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi there"}]
    expected = demo.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    ids, _ = chat_prompt(demo.tokenizer, messages, None)
    assert ids == demo.tokenizer(expected, add_special_tokens=False).input_ids
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "no json"}}
    with pytest.raises(ApiError, match="no JSON"):
        chat_prompt(demo.tokenizer, [Message.model_validate({"role": "assistant", "tool_calls": [call]})], None)


def test_usage_in_a_stream_counts_its_chunks(demo: Any) -> None:
    parts = [RequestOutput([1, 2], SamplingParams(), given=9) for _ in range(2)]  # The worker is ahead.

    class Ahead(OutputStream):
        async def deltas(self, pause: float | None = None) -> AsyncIterator[Delta | None]:
            for index, finish in ((0, None), (1, None), (0, "length"), (1, "length")):
                yield Delta(index, "a", [Emitted(5, None)] * 2, finish=finish)

    options = {"stream": True, "stream_options": {"continuous_usage_stats": True}, "return_token_ids": True}
    body = Completion.model_validate({"prompt": [1, 2], "n": 2} | options)

    async def chunks() -> list[bytes]:
        ahead = Ahead(parts, 60, lambda stream: None, whole=False)
        return [chunk async for chunk in events(Call(body, "demo", demo.tokenizer), ahead)]

    found = [json.loads(chunk.removeprefix(b"data: ")) for chunk in asyncio.run(chunks()) if b"{" in chunk]
    assert [event["usage"]["completion_tokens"] for event in found] == [2, 4, 6, 8]
    assert [event["choices"][0].get("prompt_token_ids") for event in found] == [[1, 2], [1, 2], None, None]


@pytest.mark.parametrize("written", ['{"x": 1e999}', '"no json"', '"[1]"', "NaN", '"{\\"x\\": NaN}"'])
def test_other_arguments_than_json_objects_are_no_call(written: str) -> None:
    said = f'<call>{{"name": "look", "arguments": {written}}}</call>'
    read = MessageReader(Talker(), [ord(c) for c in "user: Hi\nA: "], [TOOL]).feed(said, last=True)
    assert (read.calls, read.content) == ([], said)


@pytest.mark.parametrize("written", ['{"x": 1.5}', '"{\\"x\\": 1.5}"'])
def test_arguments_as_strings(written: str) -> None:
    said = f'<call>{{"name": "look", "arguments": {written}}}</call>'
    read = MessageReader(Talker(), [ord(c) for c in "user: Hi\nA: "], [TOOL]).feed(said, last=True)
    assert json.loads(read.calls[0]["function"]["arguments"]) == {"x": 1.5}


def shown(demo: Any, template: str, *messages: dict[str, Any]) -> str:
    """Return the prompt of messages by a template."""
    tokenizer = copy.deepcopy(demo.tokenizer)
    tokenizer.chat_template = "{% for m in messages %}" + template + "{% endfor %}"
    return str(tokenizer.decode(chat_prompt(tokenizer, [Message.model_validate(one) for one in messages], None)[0]))


LOOPS = "{{ m.role }}:{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %};"
BOTH = "{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %};"
PARTS = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]


@pytest.mark.parametrize("template", ["{{ m.role }}:{{ m.content }};", LOOPS, BOTH], ids=["text", "parts", "both"])
@pytest.mark.parametrize("content", ["Hi there", PARTS], ids=["a text", "a list"])
def test_a_template_gets_the_form_that_it_reads(demo: Any, template: str, content: Any) -> None:
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "Yes."}]
    assert shown(demo, template, *messages) == "user:Hi there;assistant:Yes.;"
    tokenizer = copy.deepcopy(demo.tokenizer)
    tokenizer.chat_template = "{% for m in messages %}" + template + "{% endfor %}"
    ids = encode_prompt(tokenizer, "Hi there", system="Be kind.")
    assert tokenizer.decode(ids) == "system:Be kind.;user:Hi there;"


def test_developer_messages_become_system_messages(demo: Any) -> None:
    messages = [{"role": role, "content": "."} for role in ("developer", "user")]
    assert shown(demo, "{{ m.role }}", *messages) == "systemuser"
    known = "{% if m.role == 'developer' %}{% endif %}{{ m.role }}"
    assert shown(demo, known, *messages) == "developeruser"


def test_a_call_without_arguments_in_the_history(demo: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": ""}}
    said = {"role": "assistant", "tool_calls": [call]}
    assert shown(demo, "{{ m.tool_calls[0].function.arguments | tojson }}", said) == "{}"


def test_unsupported_fields_may_be_null() -> None:
    unused = "audio function_call functions metadata prompt_cache_key reasoning_effort safety_identifier verbosity"
    body = {"messages": MESSAGES} | dict.fromkeys([*unused.split(), "web_search_options"])
    assert Chat.model_validate(body).messages[0].content == MESSAGES[0]["content"]


def test_a_waiting_output_has_no_first_chunk(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients take the first chunk for the first token."""
    body: dict[str, Any] = {"messages": MESSAGES, "stream": True, "ignore_eos": True, "draftree": {"drafter": "off"}}
    with serving(*demo, slots=1) as server:
        engine, path = server.worker.engine, f"{server.url}/v1/chat/completions"
        step = engine.step
        monkeypatch.setattr(engine, "step", lambda: (time.sleep(0.01), step()))
        with httpx.stream("POST", path, json=body | {"max_tokens": 40}) as first:
            lines = first.iter_lines()
            next(lines)
            with httpx.stream("POST", path, json=body | {"max_tokens": 2}) as second:
                chunks = (json.loads(line[6:]) for line in second.iter_lines() if line.startswith("data: {"))
                begins = next(chunks)["choices"][0]["delta"]
                waiting = len(engine.waiting)
                assert len(list(lines)) > 40
        assert begins["role"] == "assistant"
        assert waiting == 0, "it has a slot by then"


def test_options_that_leave_no_token_are_an_error_of_the_request(server: Running, demo: Any) -> None:
    every = list(range(len(demo.tokenizer)))
    asked = {"prompt": "a", "stop_token_ids": every, "min_tokens": 2, "max_tokens": 3, "temperature": 1.0}
    answer = server.post("/v1/completions", **asked)
    assert answer.status_code == 400
    assert "No token has a probability" in answer.json()["error"]["message"]
    assert server.idle()
