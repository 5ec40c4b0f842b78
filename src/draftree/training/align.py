"""Align a small model with a large one: it learns to write the large model's answers (BiLD, section 3.5).

The labels are the large model's greedy answers to training inputs. The small model is fine-tuned on them at a constant
learning rate, so that it disagrees less often: as a drafter it is accepted more often. The result is a stock Hugging
Face folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from draftree.drafting.folder import base_of
from draftree.drafting.second_model import check_pair, warn_of_size
from draftree.errors import brief
from draftree.runner.target import inspect_model
from draftree.runner.weights.packed import is_packed
from draftree.runner.weights.stock import has_eight_bits
from draftree.training.answers import META, AnswerOptions, Progress, make_data
from draftree.training.objectives import Objective, cross_entropy
from draftree.training.options import Inputs, TrainOptions, read_questions, template_of
from draftree.training.rows import Batch, Data, read_data
from draftree.training.trainer import Report, Session

OPTIMIZERS = {"adafactor": ("adafactor", 1e-3), "adamw": ("adamw_torch", 3e-4)}  # Hugging Face's name, learning rate
ANSWERS = "answers"  # The large model's answers lie in this folder below the result.


class AlignObjective(Objective):
    """Take the cross entropy of a model and every token of the answers, EOS included (BiLD, section 3.5).

    Args:
        model: a stock causal language model or encoder-decoder; all of it is trained.
    """

    places: tuple[int, ...] = (1,)

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def measure(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """See `Objective.measure`; logits are [B, T - 1, V]."""
        if batch.source is None or batch.source_length is None:
            logits = self.model(input_ids=batch.tokens, attention_mask=_mask(batch.length, batch.tokens)).logits
        else:
            mask = _mask(batch.source_length, batch.source)
            logits = self.model(input_ids=batch.source, attention_mask=mask, decoder_input_ids=batch.tokens).logits
        return cross_entropy(logits[:, :-1], *self.truths(batch)[0]), [logits[:, :-1]]

    def truths(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """Return, for each depth, the next tokens [B, T - 1] and a mask of the answers' tokens."""
        place = torch.arange(batch.tokens.shape[1] - 1, device=batch.tokens.device)
        answers = (place >= batch.start[:, None] - 1) & (place < batch.length[:, None] - 1)
        return [(batch.tokens[:, 1:], answers)] * len(self.places)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return all tensors, with copies of tied ones: checkpoints cannot hold a tensor under two names."""
        held: dict[str, Any] = super().state_dict(*args, **kwargs)
        seen: set[int] = set()
        for name, tensor in held.items():
            if tensor.data_ptr() in seen:
                held[name] = tensor.clone()
            seen.add(tensor.data_ptr())
        return held


def _mask(length: Tensor, of: Tensor) -> Tensor:
    return (torch.arange(of.shape[1], device=of.device) < length[:, None]).long()


def check_trainable(model: Any) -> None:
    """Refuse a model that cannot be trained as a whole or saved as a stock one.

    Raises:
        ValueError: it is packed, quantised, frozen, or has an adapter or a generation config that cannot be saved.
    """
    model = inspect_model(model).model
    if is_packed(model):
        raise ValueError("The model is packed and cannot be trained so: call draftree.unpack_weights(model) before.")
    if getattr(model, "hf_quantizer", None) is not None or has_eight_bits(model):
        raise ValueError("The model's weights are quantised and cannot be trained: load it without quantisation.")
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        raise ValueError(
            "The model has an adapter, which a stock Hugging Face folder does not hold: train what the adapter's "
            "merge_and_unload() returns."
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("All weights of the model are frozen: call model.requires_grad_(True) before.")
    if model.generation_config is not None:
        with TemporaryDirectory() as folder:
            try:
                model.generation_config.save_pretrained(folder)
            except ValueError as error:
                raise ValueError(
                    "The model's generation_config has settings that Hugging Face does not save, so the trained model "
                    f"could not be saved either: set them right or to None ({brief(error)})."
                ) from error


@contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """Hold the model's parameters in float32 inside the block: 16-bit types lose small steps."""
    dtypes = [(parameter, parameter.dtype) for parameter in model.parameters()]
    for parameter, _ in dtypes:
        parameter.data = parameter.data.float()
    try:
        yield
    finally:
        for parameter, dtype in dtypes:
            parameter.data = parameter.data.to(dtype)


def save_model(model: Any, tokenizer: Any, out: Path) -> None:
    """Save a model as Hugging Face does, with its tokenizer if there is one."""
    model.save_pretrained(out)
    if tokenizer is not None:
        tokenizer.save_pretrained(out)


def check_run(large: Any, small: Any, optimizer: str) -> None:
    """Refuse unusable arguments of `align` before any work; warn if the small model is no smaller.

    Raises:
        ValueError: an unknown optimizer, several processes, two vocabularies, an encoder on one side only, or a small
            model that cannot be trained.
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"The optimizer is {optimizer!r}: choose {' or '.join(OPTIMIZERS)}.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("A small model is aligned in one process: run this without accelerate launch.")
    theirs, ours = inspect_model(large), inspect_model(small)
    check_trainable(small)
    check_pair(ours, theirs)
    warn_of_size(ours, theirs)


def align(
    large: Any,
    small: Any,
    data: Path,
    out: Path,
    *,
    tokenizer: Any = None,
    optimizer: str = "adafactor",
    options: TrainOptions | None = None,
    report: Report = print,
) -> dict[str, Any]:
    """Fine-tune `small` on the answers of `large`, and save it into `out`; return the recipe.

    `out` gets the model, recipe.json, curve.json, curve.png and the checkpoints. The weights of `small` change. The
    recipe has the loss of the dev rows and the agreement, before and after: agreement is the share of the large
    model's tokens that are the small model's likeliest.

    Args:
        large: the model that made the data.
        small: a stock causal language model or encoder-decoder, as `large`, with the same vocabulary.
        data: a data set of `make_data`, made by `large`.
        out: folder to write.
        tokenizer: saved with the model; None for none.
        optimizer: "adafactor" or "adamw"; the learning rate is constant.
        options: options of the run.
        report: called with lines of progress.

    Raises:
        ValueError: a pair that does not fit or cannot be trained, bad data or options, or a loss that is not finite.
    """
    options = options or TrainOptions()
    check_run(large, small, optimizer)
    torch.manual_seed(options.seed)
    rows = _rows(data, large, small, options)
    name, rate = OPTIMIZERS[optimizer]
    base, start = base_of(large), base_of(small)
    session = Session(out, rows, options, large.device, rate, optim=name, lr_scheduler_type="constant")
    with in_float32(small):
        scored = session.fit(AlignObjective(small.train()), report)
    small.eval()
    both = {"before": scored[0], "after": scored[-1]}
    recipe = {
        "method": "align",
        "base_model": asdict(base),
        "small_model": asdict(start),
        "optimizer": optimizer,
        "parameters": sum(p.numel() for p in small.parameters()),
        "loss": {when: entry["eval_loss"] for when, entry in both.items()},
        "agreement": {when: entry["eval_accuracy"][0][0] for when, entry in both.items()},
        "cases": scored[-1]["eval_cases"][0],
    }
    title = f"a small model aligned with {base.name}"
    return session.finish(recipe, title, lambda _: save_model(small, tokenizer, out))


def _rows(data: Path, large: Any, small: Any, options: TrainOptions) -> Data:
    rows = read_data(data, inspect_model(large), options.max_length)
    limit = inspect_model(small).max_positions
    longest = max(max(len(row), len(row.source)) for row in [*rows.train, *rows.dev])
    if limit is not None and longest > limit:
        raise ValueError(
            f"The data has rows of {longest} tokens and the small model's context is {limit}: leave the long ones out "
            f"with --max-length {limit}."
        )
    return rows


def align_on_inputs(
    large: Any,
    tokenizer: Any,
    small: Any,
    inputs: Inputs,
    out: Path,
    *,
    answers: AnswerOptions | None = None,
    optimizer: str = "adafactor",
    options: TrainOptions | None = None,
    progress: Progress | None = None,
    report: Report = print,
) -> dict[str, Any]:
    """Let `large` answer the inputs, fine-tune `small` on its answers, and save it into `out`; see `align`.

    The answers are made in `out`/answers. A stopped run continues there, or from its last checkpoint with `resume`.

    Args:
        large, small: the pair.
        tokenizer: tokenizer of both.
        inputs: inputs, or a data set with answers of `large`.
        out: folder to write.
        answers: options of answering.
        progress: called after every answer.
        optimizer, options, report: see `align`.

    Raises:
        ValueError: see `align`, `read_questions` and `make_data`.
    """
    check_run(large, small, optimizer)
    data = inputs.data
    if (data / META).is_file():
        for name in ("field", "template", "limit"):
            if getattr(inputs, name) is not None:
                raise ValueError(f"--{name} is for inputs, and {str(data)!r} holds answers: leave it out.")
    else:
        template = template_of(tokenizer, inputs.template)
        questions = read_questions([data], inputs.limit, field=inputs.field)
        data, replace = out / ANSWERS, options is not None and options.force
        how: dict[str, Any] = {"template": template, "options": answers, "force": replace}
        make_data(large, tokenizer, questions, data, **how, progress=progress)
    run: dict[str, Any] = {"optimizer": optimizer, "options": options, "report": report}
    return align(large, small, data, out, tokenizer=tokenizer, **run)
