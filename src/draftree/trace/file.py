"""The file of a trace: JSON lines, each saying what kind it is, with a version in the first.

The file is complete in itself: token texts are in it, so that it can be read where neither model nor tokenizer is. The
format is described in `docs/trace.md`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftree.engine.recorder import Recorder
from draftree.errors import brief
from draftree.files import open_regular, parse_json, replacing
from draftree.trace.labels import label, pieces
from draftree.trace.records import Trace as Trace
from draftree.trace.records import wrong_record, wrong_whole
from draftree.version import __version__

FORMAT = 2
MOST_FIRST = 4096  # bytes of the first line
KINDS = ("run", "request", "step", "tokens")


def write_trace(recorder: Recorder, path: str | Path, tokenizer: Any = None) -> Path:
    """Write what `recorder` holds to `path`; returns the path.

    Args:
        recorder: of finished or running engines; what is recorded later is not in the file.
        path: of the file, by custom named .jsonl.
        tokenizer: gives the texts of tokens; None leaves their numbers.

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
                prompt = record["source"] or record["prompt"]  # the input of the encoder, or of the decoder
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
        ValueError: it is not a regular file or no trace, was cut off, or has a format that this version does not know.
    """
    path = Path(path)
    with open_regular(path) as file:
        first = _parsed(path, 1, file.readline(MOST_FIRST))
        lines = file.read().split(b"\n") if first.get("kind") == "trace" else []
    if "format" not in first or first.get("kind") != "trace":
        raise ValueError(f"{path} is no trace: give a file that draftree trace or draftree.write_trace wrote.")
    if first["format"] != FORMAT:
        raise ValueError(
            f"{path} is a trace of format {brief(repr(first['format']))}, and this version reads format {FORMAT}: "
            f"record it again, or read it with draftree {brief(first.get('draftree', 'of its time'))}."
        )
    trace = Trace({}, {}, [], {})
    whole = False
    for number, line in enumerate(lines, 2):
        if not line:
            continue
        record = _parsed(path, number, line)
        kind = record.get("kind")
        if kind not in KINDS:
            raise ValueError(
                f"{path}, line {number}: there is no {brief(repr(kind))} in a trace; the file was changed, so record "
                "it again."
            )
        wrong = wrong_record(trace, record)
        if wrong is not None:
            raise ValueError(f"{path}, line {number}, is not as draftree writes it, {wrong}: record the run again.")
        if kind == "run":
            trace.runs[record["run"]] = record
        elif kind == "request":
            trace.requests[record["request"]] = record
        elif kind == "step":
            trace.steps.append(record)
        else:
            trace.tokens.update((int(token), text) for token, text in record["texts"].items())
            whole = True
    if not whole:
        raise ValueError(f"{path} was cut off: its last line, with the texts of tokens, is missing. Record it again.")
    wrong = wrong_whole(trace)
    if wrong is not None:
        raise ValueError(f"{path} does not add up, {wrong}: record the run again.")
    return trace


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = parse_json(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise ValueError(f"{path}, line {number} is no JSON object: give a file that draftree trace wrote.")
    return record
