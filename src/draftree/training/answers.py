"""Make training data: the target answers questions greedily through the engine, or answers are given.

The folder of a data set holds `meta.json` and `rows.jsonl`. While it is made, a journal gets one line for each answered
question, so that a stopped run continues with the unanswered ones.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from draftree.checkpoints import Placement
from draftree.drafting.folder import base_of
from draftree.drafting.lookahead import Lookahead
from draftree.engine.engine import Engine
from draftree.engine.limits import decoder_start, eos_token_ids
from draftree.engine.request import Request, State
from draftree.engine.sampling import SamplingParams
from draftree.errors import install
from draftree.files import write_json
from draftree.models import load_model
from draftree.runner.target import Target, inspect_model
from draftree.training.options import SYSTEM, Question, Template

META, JOURNAL, ROWS = "meta.json", "journal.jsonl", "rows.jsonl"
QUEUE = 2  # The engine holds this many requests per slot.
Answered = tuple[int, list[dict[str, Any]]]  # A question's number, and one row for each of its turns.
Progress = Callable[[int, int, int], None]  # Answered questions, all questions, and new tokens of this run.
Answer = Callable[[Template, list[Question]], Iterable[Answered]]


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Set the limits of answering questions."""

    max_new_tokens: int = 256  # Most tokens of an answer; fewer if the context ends before.
    slots: int = 8  # Requests decoded together.


def make_data(
    model: Any,
    tokenizer: Any,
    questions: Sequence[Question],
    out: Path,
    *,
    template: Template | Sequence[Template],
    options: AnswerOptions | None = None,
    progress: Progress | None = None,
    answer: Answer | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Answer `questions` and write the data set into the folder `out`; return the contents of its meta.json.

    Args:
        model, tokenizer: the target and its tokenizer.
        questions: see `read_questions`; questions beyond the context are left out and counted as `skipped`.
        out: folder to write; an unfinished data set of the same questions is continued.
        template: turns a question into a prompt; of several, each makes a row of every question.
        options: how to answer.
        progress: called after every answered question.
        answer: answers the open questions instead of this process.
        force: replace other data in the folder instead of refusing it.

    Raises:
        ValueError: a folder of other data, or no question that fits into the context.
    """
    options = options or AnswerOptions()
    target, templates = inspect_model(model), [template] if isinstance(template, Template) else list(template)
    asked = []
    for place, one in enumerate(templates):
        own = [replace(q, number=q.number + place * len(questions)) for q in questions]
        asked.append(fitting_questions(target, one, own))
    fitting = [question for own in asked for question in own]
    kinds = [one.kind for one in templates]
    about = {
        "model": asdict(base_of(model)),
        "template": kinds[0] if len(kinds) == 1 else kinds,
        "system": next((one.system for one in templates if one.system is not None), None),
        "max_new_tokens": options.max_new_tokens,
        "questions": fingerprint([[q.number, q.id, list(q.turns), *q.answers] for q in fitting]),
    }
    meta = _open(out, about, force)
    if meta["complete"]:
        return meta
    done, made = _answered(out / JOURNAL), 0
    left = [[question for question in own if question.number not in done] for own in asked]
    answer = answer or partial(answer_all, model, tokenizer, options=options)
    answered = (one for template, own in zip(templates, left, strict=True) if own for one in answer(template, own))
    with (out / JOURNAL).open("ab") as journal:
        for number, rows in answered:
            line = json.dumps({"number": number, "rows": rows}, ensure_ascii=False) + "\n"
            journal.write(line.encode())
            journal.flush()
            done.add(number)
            made += sum(len(row["answer_ids"]) for row in rows)
            if progress is not None:
                progress(len(done), len(fitting), made)
    return _finish(out, meta, skipped=len(templates) * len(questions) - len(fitting))


def fingerprint(value: Any) -> str:
    """Return the SHA-256 of a JSON-able value."""
    return hashlib.sha256(json.dumps(value, ensure_ascii=True).encode()).hexdigest()


def _open(out: Path, about: dict[str, Any], force: bool) -> dict[str, Any]:
    """Read the folder's meta.json and compare it with `about`, or begin a data set; return the contents of meta.json.

    Raises:
        ValueError: the folder holds something else.
    """
    if (out / META).exists():
        meta: dict[str, Any] = json.loads((out / META).read_text("utf-8"))
        other = next((key for key, value in about.items() if meta.get(key) != value), None)
        if other is None:
            return meta
        if not force:
            other = other.replace("_", " ")
            raise ValueError(f"{str(out)!r} holds data with other {other}: name another folder, or remove that one.")
        (out / JOURNAL).unlink(missing_ok=True)
    elif out.is_dir() and (left := next(out.iterdir(), None)) is not None:
        raise ValueError(f"{str(out)!r} holds {left.name!r} and no data: name an empty folder.")
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / META, meta := about | {"complete": False})
    return meta


def _answered(journal: Path) -> set[int]:
    """Return the numbers of the answered questions, and cut off an unfinished last line."""
    if not journal.exists():
        return set()
    lines = [line for line in journal.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    os.truncate(journal, sum(map(len, lines)))
    return {json.loads(line)["number"] for line in lines}


def _finish(out: Path, meta: dict[str, Any], skipped: int) -> dict[str, Any]:
    """Write the rows in the order of the questions and remove the journal; return the contents of meta.json."""
    with (out / JOURNAL).open("rb") as lines:
        entries = sorted(map(json.loads, lines), key=lambda entry: entry["number"])
    rows = [row for entry in entries for row in entry["rows"]]
    with (out / ROWS).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    tokens = sum(len(row["answer_ids"]) for row in rows)
    meta = meta | {"complete": True, "rows": len(rows), "answer_tokens": tokens, "skipped": skipped}
    write_json(out / META, meta)
    (out / JOURNAL).unlink()
    return meta


def fitting_questions(target: Target, template: Template, questions: Sequence[Question]) -> list[Question]:
    """Return the questions whose first prompt is shorter than the context.

    Raises:
        ValueError: there is none.
    """
    limit = target.max_positions
    fitting = [q for q in questions if limit is None or len(template.encode(q.turns[:1])) < limit]
    if not fitting:
        raise ValueError(f"No question fits into the model's context of {limit}: give shorter ones.")
    return fitting


def answer_all(
    model: Any, tokenizer: Any, template: Template, questions: Iterable[Question], options: AnswerOptions
) -> Iterator[Answered]:
    """Answer questions greedily, `options.slots` at a time; yield each after its last turn."""
    engine = Engine(model, drafter=Lookahead(), slots=options.slots)
    waiting = iter(questions)
    running: list[_Conversation] = []
    while True:
        while len(running) < QUEUE * options.slots and (question := next(waiting, None)) is not None:
            rows: list[dict[str, Any]] = []
            turns = _ask(engine, tokenizer, template, question, options.max_new_tokens, rows)
            if (first := next(turns, None)) is None:
                yield question.number, rows  # All of its answers are given.
            else:
                running.append(_Conversation(question.number, rows, turns, first))
        if not running:
            return
        engine.step()
        for one in [c for c in running if c.request.state is State.FINISHED]:
            following = next(one.turns, None)
            if following is None:
                running.remove(one)
                yield one.number, one.rows
            else:
                one.request = following


@dataclass(slots=True, eq=False)
class _Conversation:
    """Hold a question, the rows of its finished turns, the iterator over its requests and the present request."""

    number: int
    rows: list[dict[str, Any]]
    turns: Iterator[Request]
    request: Request


def _ask(
    engine: Engine, tokenizer: Any, template: Template, question: Question, most: int, rows: list[dict[str, Any]]
) -> Iterator[Request]:
    """Ask turn after turn: yield the request of each that has no given answer, and add its row to `rows` at its end."""
    target, limit = engine.target, engine.target.max_positions
    ends = eos_token_ids(target.model)
    for turn, text in enumerate(question.turns):
        prompt = template.encode(question.turns[: turn + 1], [row["answer"] for row in rows])
        if turn and limit is not None and len(prompt) >= limit:
            return  # The conversation is longer than the context; the earlier turns stay.
        start, source = prompt, None
        if target.encoder_decoder:
            source = torch.tensor(prompt, device=target.device, dtype=torch.long)
            start = [decoder_start(target.model.generation_config)]
        room = None if limit is None else limit - len(start)
        finish: str | None = "eos"
        if question.answers:
            answer, end = question.answers[turn], tokenizer.eos_token_id  # Of several, it ends a turn.
            end = [end] if end in ends else list(ends[:1])
            tokens = [*tokenizer(answer, add_special_tokens=False).input_ids, *end][:room]
        else:
            new = most if room is None else min(most, room)
            request = engine.add(start, SamplingParams(max_new_tokens=new, eos_token_ids=ends), encoder_input=source)
            yield request
            if request.error is not None:
                raise request.error
            tokens, finish = request.tokens, request.finish_reason
            answer = tokenizer.decode(tokens, skip_special_tokens=True)
        row = {"id": question.id, "turn": turn, "set": question.set, "question": text, "prompt_ids": prompt}
        rows.append(row | {"answer_ids": tokens, "answer": answer, "finish": finish})


BLOCK = 2  # Questions of a block per slot of the engine.


class RayAnswers:
    """Answer questions as `answer_all` does, in `workers` processes.

    Args:
        model: folder or hub name that every worker can load; None for the embedded model.
        options: how to answer.
        workers: number of processes.
        threads: CPU threads of each; None for an equal share of the machine's.
        placement: device and dtype of each worker's model; None for the defaults.

    Raises:
        ValueError: Ray is not installed.
    """

    def __init__(
        self,
        model: str | None,
        options: AnswerOptions,
        workers: int,
        threads: int | None = None,
        placement: Placement | None = None,
    ) -> None:
        if find_spec("ray") is None:
            raise ValueError(f"More than one worker needs Ray: {install('ray')}, or leave --workers out.")
        self.workers, self.block = workers, BLOCK * options.slots
        threads = threads or max(1, (os.cpu_count() or 1) // workers)
        self.load, self.how = (model, placement), (options, threads)

    def __call__(self, template: Template, questions: Sequence[Question]) -> Iterator[Answered]:
        """Yield the answers to `questions`, which `template` turns into prompts, block by block."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        if not ray.is_initialized():
            ray.init(num_cpus=max(self.workers, os.cpu_count() or 1), include_dashboard=False, log_to_driver=False)
        items = [{"question": question} for question in questions]
        answered = ray.data.from_items(items, override_num_blocks=-(-len(items) // self.block)).map_batches(
            _Worker,
            fn_constructor_args=(self.load, (template.kind, template.system or SYSTEM), *self.how),
            batch_size=self.block,
            compute=ray.data.ActorPoolStrategy(size=self.workers),
            num_cpus=1,
        )
        for row in answered.iter_rows():
            yield row["answered"]


class _Worker:
    """Hold a model in one process."""

    def __init__(
        self, load: tuple[str | None, Placement | None], template: tuple[str, str], options: AnswerOptions, threads: int
    ) -> None:
        torch.set_num_threads(threads)
        self.model, self.tokenizer = load_model(*load)
        self.template, self.options = Template(template[0], self.tokenizer, template[1]), options

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        questions: list[Question] = list(batch["question"])
        return {"answered": list(answer_all(self.model, self.tokenizer, self.template, questions, self.options))}
