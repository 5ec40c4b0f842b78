"""Objects of the OpenAI API, out of what the worker gives: whole answers, and streams of chunks."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftree.engine import Emitted
from draftree.engine.request import StepTree, TokenScores
from draftree.grammar import GrammarError
from draftree.serve.errors import ApiError
from draftree.serve.messages import MessageReader
from draftree.serve.parts import Delta, Part
from draftree.serve.worker import Answers
from draftree.trace.labels import label


@dataclass(slots=True)
class Call:
    """One HTTP request as the API's objects name it.

    Attributes:
        kind: "chat" or "completion".
        model: its name.
        tokenizer: for the texts of single tokens.
        logprobs: likeliest tokens to tell with each; None for no log-probabilities.
        usage: whether a stream ends with usage; `each`: whether every chunk has it.
        ids: whether choices tell the ids of their tokens.
        trees: whether choices tell who drafted each token, and the draft tree of each step.
        stats: whether the answer tells draftree's own statistics.
        echo: text of the prompts that stands before completions, and `scores` of their tokens; "" for none.
        prediction: its token ids.
        readers: of each answer of a chat.
    """

    kind: str
    model: str
    tokenizer: Any
    logprobs: int | None = None
    usage: bool = False
    each: bool = False
    ids: bool = False
    trees: bool = False
    stats: bool = False
    echo: Sequence[str] = ()
    scores: Sequence[Sequence[TokenScores]] = ()
    prediction: Sequence[int] = ()
    readers: Sequence[MessageReader] = ()
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def envelope(self, *, chunk: bool) -> dict[str, Any]:
        """The fields of every object of this request."""
        name = {"chat": "chat.completion", "completion": "text_completion"}[self.kind]
        suffix = ".chunk" if chunk and self.kind == "chat" else ""
        start = "chatcmpl" if self.kind == "chat" else "cmpl"
        return {"id": f"{start}-{self.id}", "object": name + suffix, "created": self.created, "model": self.model}

    def token_text(self, token: int) -> str:
        """The text of a token alone."""
        return str(self.tokenizer.decode([token]))


class Offsets:
    """Where the tokens of one completion begin in its text, for `text_offset`."""

    def __init__(self) -> None:
        self.at = 0


def usage(parts: Sequence[Part], prompts: int, prediction: Sequence[int] = ()) -> dict[str, Any]:
    """The API's usage object.

    Accepted prediction tokens are accepted draft tokens that follow the same token in the prediction as in the answer;
    the rest of the prediction counts as rejected.

    Args:
        parts: the answers so far, also those that `best_of` leaves out.
        prompts: tokens of all prompts.
        prediction: token ids.
    """
    new = sum(part.given for part in parts)
    reused = sum(0 if part.request is None else part.request.reused for part in parts)
    found: dict[str, Any] = {
        "prompt_tokens": prompts,
        "completion_tokens": new,
        "total_tokens": prompts + new,
        "prompt_tokens_details": {"cached_tokens": min(reused, prompts)},
    }
    if prediction:
        pairs = set(itertools.pairwise(prediction))
        accepted = sum(_from_prediction(part, pairs) for part in parts)
        rejected = max(0, len(prediction) - accepted)
        found["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        }
    return found


def _from_prediction(part: Part, pairs: set[tuple[int, int]]) -> int:
    if part.request is None:
        return 0
    output = part.request.output[: part.given]
    following = itertools.pairwise(output)
    return sum(after.source is not None and (one.token, after.token) in pairs for one, after in following)


def statistics(parts: Sequence[Part]) -> dict[str, Any]:
    """draftree's own statistics of some answers."""
    answers = []
    for part in parts:
        assert part.request is not None
        stats = part.request.stats
        about = ("steps", "drafted", "accepted", "emitted", "acceptance_length", "accepted_by_depth")
        own = {name: value for name, value in stats.as_dict().items() if name in (*about, "accepted_by_source")}
        own |= {
            "reused_prompt_tokens": part.request.reused,
            "time_to_first_token": None if part.first is None else part.first - part.added,
            "seconds": part.last - part.added if part.first is not None else None,
        }
        answers.append(own)
    return {"answers": answers}


def chat_logprobs(call: Call, emitted: Sequence[Emitted]) -> dict[str, Any] | None:
    """`logprobs` of a chat choice."""
    if call.logprobs is None:
        return None
    return {"content": [_chat_token(call, e.token, e.scores) for e in emitted], "refusal": None}


def _chat_token(call: Call, token: int, scores: TokenScores | None) -> dict[str, Any]:
    assert scores is not None
    tops = [_one(call, other, logprob) for other, logprob in scores.likeliest]
    return _one(call, token, scores.chosen) | {"top_logprobs": tops}


def _one(call: Call, token: int, logprob: float) -> dict[str, Any]:
    text = call.token_text(token)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # JSON has no infinity; the API's own stand-in


def completion_logprobs(
    call: Call, tokens: Sequence[int], scores: Sequence[TokenScores | None], offsets: Offsets
) -> dict[str, Any] | None:
    """`logprobs` of a completion's choice; a token without scores (a prompt's first) has null."""
    if call.logprobs is None:
        return None
    texts = [call.token_text(token) for token in tokens]
    places = []
    for text in texts:
        places.append(offsets.at)
        offsets.at += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [None if s is None else _finite(s.chosen) for s in scores],
        "top_logprobs": [_tops(call, token, s) for token, s in zip(tokens, scores, strict=True)],
        "text_offset": places,
    }


def _tops(call: Call, token: int, scores: TokenScores | None) -> dict[str, float] | None:
    if scores is None:
        return None
    found = {call.token_text(other): _finite(logprob) for other, logprob in reversed(scores.likeliest)}
    return {call.token_text(token): _finite(scores.chosen)} | found


encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def sse(payload: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {encode(payload)}\n\n".encode("utf-8", "replace")


async def stream(call: Call, answers: Answers, prompts: int) -> AsyncIterator[bytes]:
    """The events of a streamed answer, from the first chunk to [DONE]; an error is an event as well.

    Args:
        call: the request.
        answers: what comes.
        prompts: tokens of all prompts.
    """
    envelope = call.envelope(chunk=True)
    offsets = [Offsets() for _ in answers.parts]
    begin = f"data: {encode(envelope)[:-1]}"  # the same in every chunk
    end = ',"usage":null' if call.usage and not call.each else ""

    def event(choice: dict[str, Any]) -> bytes:
        used = f',"usage":{encode(usage(answers.parts, prompts))}' if call.each else end
        return f'{begin},"choices":[{encode(choice)}]{used}}}\n\n'.encode("utf-8", "replace")

    try:
        for index in range(len(answers.parts)):
            if call.kind == "chat":
                yield event(_chat_choice(index, {"role": "assistant", "content": ""}, None))
            elif call.echo:
                yield event(_echoed(call, answers.parts[index], index, offsets[index]))
        async for delta in answers:
            if call.kind == "chat":
                logprobs, (content, finish) = chat_logprobs(call, delta.emitted), _read(call, delta)
                if content or finish or logprobs or call.ids or call.trees:
                    yield event(_chat_choice(delta.index, content, finish, logprobs) | _details(call, delta))
            elif delta.text or delta.finish or call.logprobs is not None or call.ids or call.trees:
                yield event(_completion_choice(call, delta, offsets[delta.index]) | _details(call, delta))
        last: dict[str, Any] = {}
        if call.usage:
            last["usage"] = usage(answers.parts, prompts, call.prediction)
        if call.stats:
            last["draftree"] = statistics(answers.parts)
        if last:
            yield sse(envelope | {"choices": []} | last)
    except GrammarError as error:
        yield sse(ApiError(str(error)).body())
    except Exception:
        yield sse(ApiError("The answer could not be finished: the server's log says why.", status=500).body())
    yield b"data: [DONE]\n\n"


def _details(call: Call, delta: Delta) -> dict[str, Any]:
    """What a choice tells besides, where it was asked for: ids of its tokens, and the trees they came from."""
    found: dict[str, Any] = {"token_ids": [emitted.token for emitted in delta.emitted]} if call.ids else {}
    if call.trees:
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


def _read(call: Call, delta: Delta) -> tuple[dict[str, Any], str | None]:
    """What a delta adds to a message, and how the message ends."""
    reader = call.readers[delta.index]
    read = reader.feed(delta.text, last=delta.finish is not None)
    found: dict[str, Any] = {}
    if read.content:
        found["content"] = read.content
    if read.reasoning:
        found["reasoning_content"] = read.reasoning
    if read.calls:
        found["tool_calls"] = [{"index": i} | one for i, one in enumerate(read.calls, reader.calls - len(read.calls))]
    return found, "tool_calls" if reader.calls and delta.finish == "stop" else delta.finish


def _chat_choice(
    index: int, delta: dict[str, Any], finish: str | None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _completion_choice(call: Call, delta: Delta, offsets: Offsets) -> dict[str, Any]:
    tokens, scores = [e.token for e in delta.emitted], [e.scores for e in delta.emitted]
    logprobs = completion_logprobs(call, tokens, scores, offsets)
    return {"index": delta.index, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish}


def _echoed(call: Call, part: Part, index: int, offsets: Offsets) -> dict[str, Any]:
    scores: list[TokenScores | None] = [None, *(call.scores[index] if call.scores else ())]
    logprobs = completion_logprobs(call, part.prompt, scores, offsets) if call.scores else None
    return {"index": index, "text": call.echo[index], "logprobs": logprobs, "finish_reason": None}


async def collect(answers: Answers) -> list[Delta]:
    """The whole of each answer, as one delta."""
    whole = [Delta(i) for i in range(len(answers.parts))]
    async for delta in answers:
        whole[delta.index].add(delta)
    return whole


def best(whole: Sequence[Delta], keep: int) -> list[int]:
    """Numbers of the `keep` answers with the best mean log-probability, in their order (`best_of`)."""

    def mean(delta: Delta) -> float:
        scored = [e.scores.chosen for e in delta.emitted if e.scores is not None]
        return sum(scored) / len(scored) if scored else float("-inf")

    order = sorted(range(len(whole)), key=lambda i: -mean(whole[i]))
    return order[:keep]


def whole_choice(call: Call, delta: Delta, index: int, part: Part, echo: int | None) -> dict[str, Any]:
    """A choice of an answer that is not streamed.

    Args:
        call: the request.
        delta: all of the answer.
        index: of the choice.
        part: the answer.
        echo: which of `call.echo` stands before it; None for none.
    """
    own: dict[str, Any] = _details(call, delta) | ({"prompt_token_ids": list(part.prompt)} if call.ids else {})
    if call.kind == "chat":
        found, finish = _read(call, delta)
        message = {"role": "assistant", "content": None if "tool_calls" in found else "", "refusal": None} | found
        for one in message.get("tool_calls", ()):
            del one["index"]
        logprobs = chat_logprobs(call, delta.emitted)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish} | own
    offsets = Offsets()
    tokens, scores = [e.token for e in delta.emitted], [e.scores for e in delta.emitted]
    text = delta.text
    if echo is not None:
        text = call.echo[echo] + text
        if call.scores:
            tokens, scores = [*part.prompt, *tokens], [None, *call.scores[echo], *scores]
    logprobs = completion_logprobs(call, tokens, scores, offsets)
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": delta.finish} | own
