"""Answer questions in several processes, on one machine or many, by Ray Data's actor pool.

Each worker loads a model and answers a block of questions at a time. Ray gives the block of a dead worker to another
one and returns whole blocks only, so each question is answered once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from draftree.errors import install
from draftree.models import load_model
from draftree.placement import Placement
from draftree.training.answers import Answered, AnswerOptions, answer_all
from draftree.training.questions import SYSTEM, Question, Template

BLOCK = 2  # Questions of a block per slot of the engine.


class RayAnswers:
    """Answer questions as `answer_all` does, in `workers` processes.

    Args:
        model: folder or hub name that every worker can load; None for the embedded model.
        template: turns a question into a prompt.
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
        template: Template,
        options: AnswerOptions,
        workers: int,
        threads: int | None = None,
        placement: Placement | None = None,
    ) -> None:
        if find_spec("ray") is None:
            raise ValueError(f"More than one worker needs Ray: {install('ray')}, or leave --workers out.")
        self.workers, self.block = workers, BLOCK * options.slots
        threads = threads or max(1, (os.cpu_count() or 1) // workers)
        self.arguments = (model, placement, (template.kind, template.system or SYSTEM), options, threads)

    def __call__(self, questions: Sequence[Question]) -> Iterator[Answered]:
        """Yield the answers to `questions`, block by block."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        if not ray.is_initialized():
            ray.init(num_cpus=max(self.workers, os.cpu_count() or 1), include_dashboard=False, log_to_driver=False)
        items = [{"question": question} for question in questions]
        answered = ray.data.from_items(items, override_num_blocks=-(-len(items) // self.block)).map_batches(
            _Worker,
            fn_constructor_args=self.arguments,
            batch_size=self.block,
            compute=ray.data.ActorPoolStrategy(size=self.workers),
            num_cpus=1,
        )
        for row in answered.iter_rows():
            yield row["answered"]


class _Worker:
    """Hold a model in one process."""

    def __init__(
        self,
        model: str | None,
        placement: Placement | None,
        template: tuple[str, str],
        options: AnswerOptions,
        threads: int,
    ) -> None:
        import torch

        torch.set_num_threads(threads)
        self.model, self.tokenizer = load_model(model, placement)
        self.template, self.options = Template(template[0], self.tokenizer, template[1]), options

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        questions: list[Question] = list(batch["question"])
        return {"answered": list(answer_all(self.model, self.tokenizer, self.template, questions, self.options))}
