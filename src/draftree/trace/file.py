"""The file of a trace, and everything computed from it: statistics and a web page.

The file has JSON lines. Each line names its kind, and the first one has the version of the format. Token texts are
included, so that neither model nor tokenizer is needed to read it. `docs/trace.md` describes the fields.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftree import __version__
from draftree.detokenizer import Detokenizer
from draftree.engine.recorder import Recorder
from draftree.engine.request import RequestStats, RunStats
from draftree.errors import brief
from draftree.files import replacing, write_text
from draftree.pages import fill

FORMAT = 2
# Characters that could end the data's element in a page become JSON escapes.
ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded run, as plain values.

    Attributes:
        runs: the engines, by number.
        requests: by id.
        steps: in the order in which they happened, run by run.
        tokens: text of each token id alone.
    """

    runs: dict[int, dict[str, Any]]
    requests: dict[int, dict[str, Any]]
    steps: list[dict[str, Any]]
    tokens: dict[int, str]

    def of(self, request: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield (step, the request's part of it) for each step of a request."""
        for step in self.steps:
            for member in step["members"]:
                if member["request"] == request:
                    yield step, member

    def names(self) -> dict[int, str]:
        """Return a display name of each request, by id."""
        named = enumerate(self.requests.items(), 1)
        return {request: request_name(number, about["prompt_text"]) for number, (request, about) in named}

    def statistics(self) -> RunStats:
        """Return the statistics of all requests, computed from the steps as the engine computes them."""
        found = {request: RequestStats() for request in self.requests}
        for step in self.steps:
            sources = self.runs[step["run"]]["sources"]
            share = 1 / len(step["members"])
            for member in step["members"]:
                stats = found[member["request"]]
                stats.count(member["accepted"], len(member["tokens"]) - 1)
                accepted = (node for node in member["accepted"] if node is not None)
                stats.accepted_by_source.update(sources[member["sources"][node]] for node in accepted)
                stats.pruned += len(member["pruned"])
                for stage, seconds in step["seconds"].items():
                    stats.seconds[stage] += seconds * share
        return RunStats(list(found.values()))


def write_trace(recorder: Recorder, path: str | Path, tokenizer: Any = None) -> Path:
    """Write the records of `recorder` to `path`, and return the path.

    Args:
        recorder: of finished or running engines.
        path: of the file, usually named .jsonl.
        tokenizer: gives the texts of tokens; None writes their ids.

    Raises:
        ValueError: nothing was recorded.
    """
    records = list(recorder.records())
    if not any(record["kind"] == "step" for record in records):
        raise ValueError("The recorder holds no step: give it to generate or Engine first, and write it afterwards.")
    output: dict[int, list[int]] = {}
    seen: set[int] = set()
    for record in records:
        if record["kind"] == "step":
            for member in record["members"]:
                output.setdefault(member["request"], []).extend(member["emitted"])
                seen.update(member["tokens"], member["emitted"])
    path = Path(path)
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        _line(file, {"kind": "trace", "format": FORMAT, "draftree": __version__})
        for record in records:
            if record["kind"] == "request":
                prompt = record["source"] or record["prompt"]  # The input of the encoder, or of the decoder.
                record["prompt_text"] = " ".join(map(str, prompt)) if tokenizer is None else tokenizer.decode(prompt)
                record["pieces"] = pieces(tokenizer, output.get(record["request"], []))
            _line(file, record)
        texts = {str(token): label(tokenizer, token) for token in sorted(seen)}
        _line(file, {"kind": "tokens", "texts": texts})
    return path


def _line(file: Any, record: dict[str, Any]) -> None:
    file.write(json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n")


def read_trace(path: str | Path) -> Trace:
    """Read a trace that `write_trace` wrote.

    Raises:
        OSError: there is no such file.
        ValueError: the file is not a trace, or has another format.
    """
    path = Path(path)
    lines = path.read_bytes().splitlines()
    first: Any = None
    with suppress(ValueError):
        first = json.loads(lines[0] if lines else b"")
    if not isinstance(first, dict) or first.get("kind") != "trace":
        raise ValueError(f"{path} is no trace: give a file that draftree trace or draftree.write_trace wrote.")
    if first["format"] != FORMAT:
        raise ValueError(
            f"{path} is a trace of format {brief(repr(first['format']))}, and this version reads format {FORMAT}: "
            "record it again."
        )
    trace = Trace({}, {}, [], {})
    for record in map(json.loads, lines[1:]):
        if record["kind"] == "run":
            trace.runs[record["run"]] = record
        elif record["kind"] == "request":
            trace.requests[record["request"]] = record
        elif record["kind"] == "step":
            trace.steps.append(record)
        else:
            trace.tokens.update((int(token), text) for token, text in record["texts"].items())
    return trace


def write_trace_page(trace: Trace, path: str | Path, title: str = "draftree trace") -> Path:
    """Write `trace` as one self-contained HTML page, and return the path.

    The page makes no network requests. Texts are stored as data, never as markup.
    """
    data = json.dumps(asdict(trace) | {"names": trace.names()}, separators=(",", ":"), allow_nan=False)
    write_text(path, fill("draftree.trace", title=html.escape(title), data=data.translate(ESCAPES)))
    return Path(path)


BROKEN = "\ufffd"
# Byte-level tokenizers name printable bytes by themselves and number the others from 256 on.
_PRINTABLE = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
_OTHERS = [b for b in range(256) if b not in _PRINTABLE]
BYTE_ALPHABET = {chr(b): b for b in _PRINTABLE} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}
LONGEST_NAME = 24  # Characters of a prompt in the name of its request.
# Markers of chat templates, such as "<|im_start|>user".
MARKER = re.compile(
    r"(?:<\|[^<>|\s]+\|>|</?(?:s|bos|pad|think|start_of_turn|end_of_turn)>|\[/?INST\])(?:(?:system|user|assistant|model)\b)?"
)


def request_name(number: int, prompt: str) -> str:
    """Return a request's number and the beginning of its prompt, such as "2: Write a shell command th…"."""
    turns = [" ".join(turn.split()) for turn in MARKER.split(prompt)]
    text = next(filter(None, reversed(turns)), "an empty prompt")
    text = "".join(character if character.isprintable() else " " for character in text)
    return f"{number}: {text if len(text) <= LONGEST_NAME else text[:LONGEST_NAME] + '…'}"


def pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    """Return a piece of text for each token; joined they are the text with its special tokens."""
    if tokenizer is None:
        return [f"{token} " for token in ids]
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    cut = [detokenizer.feed(token) for token in ids]
    if cut:
        cut[-1] += detokenizer.rest()
    return cut


def label(tokenizer: Any, token: int) -> str:
    """Return the text of a token alone, with `\\xe2` for incomplete characters; its id without a tokenizer."""
    if tokenizer is None or token < 0:
        return str(token)
    text: str = tokenizer.decode([token])
    name = str(tokenizer.convert_ids_to_tokens(token))
    if BROKEN not in text:
        return f" {text}" if name.startswith("▁") and not text.startswith(" ") else text  # Decoders drop a first space.
    if name.startswith("<0x"):
        return "\\x" + name[3:5].lower()
    return "".join(_byte(character) for character in name)


def _byte(character: str) -> str:
    """Return the byte that a character in a byte-level tokenizer's name stands for."""
    value = BYTE_ALPHABET.get(character)
    if value is None:
        return character
    return chr(value) if 32 <= value < 127 else f"\\x{value:02x}"
