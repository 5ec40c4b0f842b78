"""Build objects of the OpenAI API from outputs: whole responses, and streams of chunks."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json

from draftree.engine import Emitted
from draftree.engine.request import StepTree, TokenScores
from draftree.errors import ModelChangedError, NoTokenError
from draftree.grammar import GrammarBusyError, GrammarError
from draftree.serve.chat import MessageReader
from draftree.serve.output import Delta, OutputStream, RequestOutput, TokenBytes, token_text
from draftree.serve.protocol import Chat, Completion, StreamOptions
from draftree.serve.settings import ApiError, log_failure
from draftree.trace.file import label, pieces

KEEP_ALIVE = 15.0  # Seconds of silence after which a stream sends a comment, because proxies close silent ones.
STATISTICS = ("steps", "drafted", "accepted", "emitted", "acceptance_length", "accepted_by_depth", "accepted_by_source")


@dataclass(slots=True)
class Call:
    """Hold one HTTP request as far as its responses need it."""

    body: Chat | Completion
    model: str  # Name of the model.
    tokenizer: Any
    logprobs: int | None = None  # Likeliest tokens to report for each position; None for no log-probabilities.
    echo: Sequence[str] = ()  # By output, the text of the prompt; empty without `echo`.
    scores: Sequence[Sequence[TokenScores]] = ()  # By output, scores of the prompt, with `echo` and `logprobs`.
    prediction: Sequence[int] = ()
    readers: Sequence[MessageReader] = ()  # One for each output of a chat.
    unused: Sequence[str] = ()  # Fields of the request without effect.
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    bytes: TokenBytes = field(init=False)

    def __post_init__(self) -> None:
        self.bytes = TokenBytes(self.tokenizer)

    @property
    def chat(self) -> bool:
        """Return True for /v1/chat/completions."""
        return isinstance(self.body, Chat)

    def envelope(self, *, chunk: bool) -> dict[str, Any]:
        """Return the fields that all objects of this request share."""
        if self.chat:
            found = {"id": f"chatcmpl-{self.id}", "object": "chat.completion.chunk" if chunk else "chat.completion"}
        else:
            found = {"id": f"cmpl-{self.id}", "object": "text_completion"}
        return found | {"created": self.created, "model": self.model}

    def token_text(self, token: int) -> str:
        """Return the text of a token alone."""
        return token_text(self.tokenizer, token)

    def token_key(self, token: int) -> str:
        r"""Return the key of a token in `top_logprobs` of completions: its text, or `bytes:\xe4` as in OpenAI's API.

        Parts of characters all have the same text, the replacement character.
        """
        text, own = self.token_text(token), bytes(self.bytes.of(token))
        parts = "\ufffd" in text and text.encode() != own
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own) if parts else text


def usage(call: Call, outputs: Sequence[RequestOutput], new: int | None = None) -> dict[str, Any]:
    """Return the API's usage object; each prompt counts once.

    Accepted prediction tokens are accepted draft tokens that follow the same token in the prediction as in the answer;
    the rest of the prediction counts as rejected.
    """
    each, prediction = call.body.count, call.prediction
    prompts = sum(len(output.prompt) for output in outputs) // each
    reused = sum(0 if output.request is None else output.request.reused for output in outputs) // each
    count = sum(output.given for output in outputs) if new is None else new
    found: dict[str, Any] = {
        "prompt_tokens": prompts,
        "completion_tokens": count,
        "total_tokens": prompts + count,
        "prompt_tokens_details": {"cached_tokens": reused},
    }
    if prediction and new is None:
        pairs = set(itertools.pairwise(prediction))
        accepted = sum(_from_prediction(output, pairs) for output in outputs)
        found["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": max(0, len(prediction) - accepted),
        }
    return found


def _from_prediction(output: RequestOutput, pairs: set[tuple[int, int]]) -> int:
    if output.request is None:
        return 0
    following = itertools.pairwise(output.request.output[: output.given])
    return sum(after.source is not None and (one.token, after.token) in pairs for one, after in following)


def statistics(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return draftree's own statistics of outputs."""
    found = []
    for output in outputs:
        if output.request is None:  # The client wanted the prompt alone.
            continue
        counts = output.request.stats.as_dict()
        times = {
            "reused_prompt_tokens": output.request.reused,
            "time_to_first_token": None if output.first is None else output.first - output.added,
            "seconds": None if output.first is None else output.last - output.added,
        }
        found.append({name: counts[name] for name in STATISTICS} | times)
    return {"answers": found}


def _logprobs(call: Call, delta: Delta, output: RequestOutput) -> dict[str, Any] | None:
    """Return `logprobs` of a choice; tokens without scores (the first of a prompt) get null."""
    if call.logprobs is None:
        return None
    emitted = delta.emitted
    if call.chat:
        return {"content": [_chat_token(call, e.token, e.scores) for e in emitted], "refusal": None}
    *places, output.offset = itertools.accumulate(map(len, delta.pieces), initial=output.offset)
    return {
        "tokens": [call.token_key(e.token) for e in emitted],
        "token_logprobs": [None if e.scores is None else _finite(e.scores.chosen) for e in emitted],
        "top_logprobs": [_tops(call, e.token, e.scores) for e in emitted],
        "text_offset": places,
    }


def _chat_token(call: Call, token: int, scores: TokenScores | None) -> dict[str, Any]:
    assert scores is not None
    tops = [_one(call, other, logprob) for other, logprob in scores.likeliest]
    return _one(call, token, scores.chosen) | {"top_logprobs": tops}


def _one(call: Call, token: int, logprob: float) -> dict[str, Any]:
    return {"token": call.token_text(token), "logprob": _finite(logprob), "bytes": call.bytes.of(token)}


def _tops(call: Call, token: int, scores: TokenScores | None) -> dict[str, float] | None:
    if scores is None:
        return None
    own = call.token_key(token)
    found = {call.token_key(other): _finite(logprob) for other, logprob in reversed(scores.likeliest)}
    return {own: 0.0} | found | {own: _finite(scores.chosen)}  # The chosen token precedes equal texts.


def _finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # JSON has no infinity; OpenAI uses -9999 too.


def sse(payload: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: %b\n\n" % to_json(payload)


async def events(call: Call, stream: OutputStream) -> AsyncIterator[bytes]:
    """Yield the server-sent events of a response up to [DONE]; an error is an event as well."""
    envelope, outputs = call.envelope(chunk=True), stream.outputs
    options = call.body.stream_options or StreamOptions()
    brought = 0  # Tokens in chunks so far.

    def event(choice: dict[str, Any]) -> bytes:
        used: dict[str, Any] = {"usage": None} if options.include_usage else {}
        if options.continuous_usage_stats:
            used = {"usage": usage(call, outputs, new=brought)}
        return sse(envelope | {"choices": [choice]} | used)

    try:
        for index, output in enumerate(outputs):
            if not call.chat and call.echo:  # Log-probabilities take long, so that a thread formats them.
                yield event(await asyncio.to_thread(_echoed, call, output, index))
        begun = set[int]()
        async for delta in stream.deltas(KEEP_ALIVE):
            if delta is None:
                yield b": waiting\n\n"
                continue
            first = delta.index not in begun
            begun.add(delta.index)
            if first and call.chat:  # Clients take this chunk for the first token, so that it must not precede it.
                yield event(_chat_choice(delta.index, {"role": "assistant", "content": ""}, None, None))
            brought += len(delta.emitted)
            choice = _chunk(call, delta, outputs[delta.index], first=first)
            if choice is not None:
                yield event(choice)
        last: dict[str, Any] = {}
        if options.include_usage:
            last["usage"] = usage(call, outputs)
        if call.body.own.stats:
            last["draftree"] = statistics(outputs)
        if last:
            yield sse(envelope | {"choices": []} | last)
    except BaseException as error:
        stream.cancel()  # The client may leave before the first delta.
        if not isinstance(error, Exception):
            raise
        yield sse(api_error(error).body())
    yield b"data: [DONE]\n\n"


def _chunk(call: Call, delta: Delta, output: RequestOutput, *, first: bool) -> dict[str, Any] | None:
    """Return the choice of a delta; None if the delta adds nothing."""
    details = _details(call, delta)
    if first and call.body.return_token_ids:
        details["prompt_token_ids"] = list(output.prompt)
    if call.chat:
        message, finish = message_parts(call, delta)
        choice, news = _chat_choice(delta.index, message, finish, _logprobs(call, delta, output)), message or finish
    else:
        choice, news = _completion_choice(call, delta, output), delta.text or delta.finish
    return choice | details if news or choice["logprobs"] or details else None


def api_error(error: BaseException) -> ApiError:
    """Return the API error for an error that ended an output; log unexpected ones."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, GrammarBusyError | ModelChangedError):
        return ApiError(str(error), status=503, retry_after=60 if isinstance(error, GrammarBusyError) else None)
    if isinstance(error, GrammarError | NoTokenError):
        return ApiError(str(error))
    log_failure(error)
    return ApiError("The server could not answer: its log says why.", status=500)


def _details(call: Call, delta: Delta) -> dict[str, Any]:
    """Return the token ids and draft trees of a choice, if the request wants them."""
    found: dict[str, Any] = {}
    if call.body.return_token_ids:
        found["token_ids"] = [emitted.token for emitted in delta.emitted]
    if call.body.own.trees:
        found["draftree"] = {
            "pieces": delta.pieces,
            "drafters": [emitted.source for emitted in delta.emitted],
            "trees": [_tree(call, tree) for tree in delta.trees],
        }
    return found


def _tree(call: Call, tree: StepTree) -> dict[str, Any]:
    texts = {"tokens": [label(call.tokenizer, token) for token in tree.tokens]}
    texts["emitted"] = [label(call.tokenizer, token) for token in tree.emitted]
    return texts | {"parents": tree.parents, "drafters": tree.drafters, "accepted": tree.accepted}


def message_parts(call: Call, delta: Delta) -> tuple[dict[str, Any], str | None]:
    """Return the parts that a delta adds to a message, and its finish reason."""
    reader = call.readers[delta.index]
    read = reader.feed(delta.text, last=delta.finish is not None, end_token=delta.end_token)
    found: dict[str, Any] = {}
    if read.content:
        found["content"] = read.content
    if read.reasoning:
        found["reasoning_content"] = read.reasoning
    if read.calls:
        found["tool_calls"] = [{"index": i} | one for i, one in enumerate(read.calls, reader.calls - len(read.calls))]
    return found, "tool_calls" if reader.calls and delta.finish == "stop" else delta.finish


def _chat_choice(
    index: int, delta: dict[str, Any], finish: str | None, logprobs: dict[str, Any] | None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _completion_choice(call: Call, delta: Delta, output: RequestOutput) -> dict[str, Any]:
    logprobs = _logprobs(call, delta, output)
    return {"index": delta.index, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish}


def _echoed(call: Call, output: RequestOutput, index: int) -> dict[str, Any]:
    return _completion_choice(call, _echo(call, output, index), output)


def _echo(call: Call, output: RequestOutput, index: int) -> Delta:
    """Return the prompt of a completion as a delta before the output."""
    text = call.echo[index]
    if not call.scores:
        return Delta(index, text)
    cut = pieces(call.tokenizer, list(output.prompt))
    added = max(0, "".join(cut).find(text))  # Characters that the tokenizer added, such as a BOS.
    ends = [min(max(0, end - added), len(text)) for end in itertools.accumulate(map(len, cut))]
    places = itertools.pairwise([0, *ends[:-1], len(text)])
    emitted = [Emitted(t, None, s) for t, s in zip(output.prompt, [None, *call.scores[index]], strict=True)]
    return Delta(index, text, emitted, [text[begin:end] for begin, end in places])


def whole_choice(call: Call, delta: Delta, index: int, output: RequestOutput) -> dict[str, Any]:
    """Return choice `index` of a response that is not streamed, from the delta of a whole output."""
    own = _details(call, delta)
    if call.body.return_token_ids:
        own["prompt_token_ids"] = list(output.prompt)
    if call.chat:
        found, finish = message_parts(call, delta)
        message = {"role": "assistant", "content": None if "tool_calls" in found else "", "refusal": None} | found
        for one in message.get("tool_calls", ()):
            del one["index"]
        logprobs = _logprobs(call, delta, output)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish} | own
    if call.echo:
        prompt = _echo(call, output, delta.index)
        prompt.add(delta)
        delta = prompt
    return _completion_choice(call, delta, output) | {"index": index} | own
