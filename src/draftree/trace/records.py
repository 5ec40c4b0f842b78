"""The records of a trace, and what must hold in them, so that whatever shows one can rely on it.

A file may have been changed by hand or by damage. Each check says what is wrong in a few words; `docs/trace.md`
describes the fields.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from draftree.engine.stats import STAGES
from draftree.errors import LARGEST
from draftree.files import is_whole


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded run as read from its file; entries are plain values as `docs/trace.md` tells."""

    runs: dict[int, dict[str, Any]]  # the engines, by number
    requests: dict[int, dict[str, Any]]  # by id
    steps: list[dict[str, Any]]  # in the order they happened, run by run
    tokens: dict[int, str]  # token id -> text of it alone

    def of(self, request: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """(step, this request's part of it) for every step that the request took part in."""
        for step in self.steps:
            for member in step["members"]:
                if member["request"] == request:
                    yield step, member


def wrong_record(trace: Trace, record: dict[str, Any]) -> str | None:
    """What is wrong with a record that follows those in `trace`; None where nothing is."""
    kind = record["kind"]
    if kind == "run":
        fine = is_whole(record.get("run")) and _texts(record.get("sources"))
        return None if fine else "a run needs a number and the names of its sources"
    if kind == "tokens":
        texts: Any = record.get("texts")
        fine = isinstance(texts, dict) and all(
            token.removeprefix("-").isdecimal() and len(token) < 20 for token in texts
        )
        return None if fine and _texts(list(texts.values())) else "texts are those of tokens, by their ids"
    run = record.get("run")
    if not is_whole(run) or run not in trace.runs:
        return f"a {kind} names a run that does not stand before it"
    if kind == "request":
        fine = is_whole(record.get("request")) and _tokens(record.get("prompt")) and _texts(record.get("pieces"))
        fine = fine and (record.get("source") is None or _tokens(record["source"]))
        fine = (
            fine
            and _texts([record.get("prompt_text"), record.get("finish_reason") or ""])
            and "finish_reason" in record
        )
        return None if fine else "a request needs a number, a prompt and the pieces of its answer"
    seconds, members = record.get("seconds"), record.get("members")
    if not isinstance(seconds, dict) or list(seconds) != list(STAGES) or not isinstance(record.get("passed"), bool):
        return "a step needs the seconds of its stages, and whether it passed"
    if not all(map(_number, (*seconds.values(), record.get("shape_seconds"), record.get("at")))):
        return "a time is no number"
    if not isinstance(members, list) or not members:
        return "a step needs the parts of its requests"
    wrong = (_wrong_member(trace, run, member) for member in members)
    return next((found for found in wrong if found is not None), None)


def wrong_whole(trace: Trace) -> str | None:
    """What is wrong between the records of a trace; None where nothing is."""
    if not trace.steps:
        return "there is no step"
    emitted: Counter[int] = Counter()
    for step in trace.steps:
        for member in step["members"]:
            emitted[member["request"]] += len(member["emitted"])
            if not trace.tokens.keys() >= {*member["tokens"], *member["emitted"]}:
                return "a token has no text"
    if any(len(request["pieces"]) != emitted[number] for number, request in trace.requests.items()):
        return "an answer has other pieces than tokens"
    return None


def _wrong_member(trace: Trace, run: int, member: Any) -> str | None:
    if not isinstance(member, dict):
        return "a part of a step is no object"
    request = member.get("request")
    if not is_whole(request) or request not in trace.requests or trace.requests[request]["run"] != run:
        return "a step names a request that does not stand before it"
    tokens: Any = member.get("tokens")
    if not _tokens(tokens) or not 1 <= len(tokens) <= 1 + LARGEST:
        return f"a tree needs 1 token or more, and at most {LARGEST} besides its root"
    parents, logp, sources = (member.get(name) for name in ("parents", "logp", "sources"))
    if not isinstance(parents, list) or not isinstance(logp, list) or not isinstance(sources, list):
        return "a tree needs lists of parents, probabilities and sources"
    if not len(parents) == len(logp) == len(sources) == len(tokens):
        return "a tree needs a parent, a probability and a source for each token"
    if parents[0] != -1 or not all(is_whole(above, 0, i) for i, above in enumerate(parents[1:])):
        return "a node of a tree does not stand behind its parent"
    if not all(p is None or _number(p) for p in logp):
        return "a probability is no number"
    names = len(trace.runs[run]["sources"])
    if sources[0] is not None or not all(is_whole(source, 0, names - 1) for source in sources[1:]):
        return "a node has a source that the run does not name"
    pruned, path, accepted = (member.get(name) for name in ("pruned", "path", "accepted"))
    if not isinstance(pruned, list) or not isinstance(path, list) or not isinstance(accepted, list):
        return "a part of a step lacks nodes"
    if not all(is_whole(node, 0, len(tokens) - 1) for node in (*pruned, *path)):
        return "a node is not in its tree"
    if not all(node is None or is_whole(node, 1, len(tokens) - 1) for node in accepted):
        return "a node is not in its tree"
    if not _tokens(member.get("emitted")) or not len(member["emitted"]) == len(path) == len(accepted):
        return "emitted tokens are not as many as the nodes behind which they were"
    budget = member.get("budget", False)
    if not is_whole(member.get("drafted")):
        return "a part of a step needs the number of draft tokens"
    return None if budget is None or is_whole(budget) else "the number of draft tokens that were asked for is none"


def _tokens(value: Any) -> bool:
    return isinstance(value, list) and all(is_whole(token, -(2**62)) for token in value)


def _texts(value: Any) -> bool:
    """Whether a value is a list of texts that UTF-8 can hold; JSON's escapes can hold halves of characters as well."""
    try:
        return isinstance(value, list) and bool("".join(value).encode() or True)
    except (TypeError, UnicodeEncodeError):
        return False


def _number(value: Any) -> bool:
    return type(value) in (int, float) and -1e9 <= value <= 1e9
