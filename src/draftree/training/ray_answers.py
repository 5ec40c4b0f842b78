"""Answering questions in several processes, on one machine or many: Ray Data's actor pool.

Every worker holds a model and an engine of its own and answers a handful of questions at a time. Ray starts a worker
that has died again and gives its unfinished handful to another, and whole handfuls alone come back, so the journal of
`make_data` sees every question once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from draftree.errors import install
from draftree.models import load_model
from draftree.placement import Placement
from draftree.training.answers import Answered, AnswerOptions, answer_all
from draftree.training.questions import Question, Template

HANDFUL = 2  # questions of a task, in units of the engine's slots


class RayAnswers:
    """Answers questions as `answer_all` does, in `workers` processes.

    Args:
        model: folder or hub name that every worker can load; None for the embedded model.
        template: how a question becomes a prompt.
        options: how to answer.
        workers: processes.
        threads: CPU threads of each; None shares the machine's among them.
        placement: device and type of each one's model; None for the defaults.

    Raises:
        ValueError: Ray is not installed.
    """

    def __init__(
        self,
        model: str | None,
        template: Template,
        options: AnswerOptions,
        workers: int,
        threads: int | None = None,
        placement: Placement | None = None,
    ) -> None:
        if find_spec("ray") is None:
            raise ValueError(f"More than one worker needs Ray: {install('ray')}, or leave --workers out.")
        self.workers, self.slots = workers, options.slots
        self.arguments = {
            "model": model,
            "placement": placement,
            "template": template.kind,
            "system": template.system,
            "options": asdict(options),
            "threads": threads or max(1, (os.cpu_count() or 1) // workers),
        }

    def __call__(self, questions: Sequence[Question]) -> Iterator[Answered]:
        """Answer `questions`; each comes back when its handful is done."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        mine = not ray.is_initialized()
        if mine:
            ray.init(num_cpus=max(self.workers, os.cpu_count() or 1), include_dashboard=False, log_to_driver=False)
        try:
            yield from self._run(ray.data, questions)
        finally:
            if mine:
                ray.shutdown()

    def _run(self, data: Any, questions: Sequence[Question]) -> Iterator[Answered]:
        handful = HANDFUL * self.slots
        context = data.DataContext.get_current()
        shown, context.enable_progress_bars = context.enable_progress_bars, False
        try:
            items = [{"question": json.dumps(asdict(question))} for question in questions]
            answered = data.from_items(items, override_num_blocks=-(-len(items) // handful)).map_batches(
                _Worker,
                fn_constructor_kwargs=self.arguments,
                batch_size=handful,
                compute=data.ActorPoolStrategy(size=self.workers),
                num_cpus=1,
            )
            for row in answered.iter_rows():
                yield int(row["number"]), json.loads(row["rows"])
        finally:
            context.enable_progress_bars = shown


class _Worker:
    """One process: a model, and an engine for each handful."""

    def __init__(
        self,
        model: str | None,
        placement: Placement | None,
        template: str,
        system: str | None,
        options: dict[str, Any],
        threads: int,
    ) -> None:
        import torch

        torch.set_num_threads(threads)
        self.model, self.tokenizer = load_model(model, placement)
        self.template = Template(template, self.tokenizer, *([system] if system is not None else []))
        self.options = AnswerOptions(**options)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        questions = []
        for text in batch["question"]:
            held = json.loads(text)
            questions.append(Question(held["number"], held["id"], held["set"], tuple(held["turns"])))
        answered = list(answer_all(self.model, self.tokenizer, self.template, questions, self.options))
        return {"number": [number for number, _ in answered], "rows": [json.dumps(rows) for _, rows in answered]}
