"""`draftree train align`: a small model learns to write what a large one writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from draftree.cli.options import MaxNewTokens, Model, grouped
from draftree.cli.train_run import Run
from draftree.cli.where import Where
from draftree.training.options import Inputs


@dataclass(frozen=True)
class AlignRun(Run):
    """Options of such a run."""

    batch: Annotated[int, "Rows of a pass, on each device."] = 32
    learning_rate: Annotated[
        float | None, typer.Option(help="From first to last.", show_default="1e-3; adamw 3e-4")
    ] = None


@grouped
def align(
    *,
    small: Annotated[str, "The small model: folder or hub name."],
    inputs: Inputs,
    out: Annotated[Path, "Folder for the aligned model, its recipe, curve and checkpoints."],
    model: Model = None,
    where: Where,
    max_new_tokens: MaxNewTokens = 256,
    answer_batch: Annotated[int, typer.Option(min=1, help="Inputs that the large model answers together.")] = 16,
    optimizer: Annotated[str, "adafactor or adamw."] = "adafactor",
    run: AlignRun,
) -> None:
    """Fine-tune a small model on a large one's greedy outputs (BiLD); the result is a stock Hugging Face model."""
    run.begin(out, "align")
    where.check()
    from draftree.checkpoints import known_folder
    from draftree.cli.screen import DataBar, line_console
    from draftree.drafting import DraftModel
    from draftree.training.align import align_on_inputs
    from draftree.training.answers import AnswerOptions

    console = line_console()
    kept = f"what was done is kept in {out}: the same command goes on with the answers, and --resume from a checkpoint"
    with DataBar(console, kept) as bar:
        large, tokenizer = where.load(model)
        recipe = align_on_inputs(
            large,
            tokenizer,
            DraftModel.from_pretrained(known_folder(small), tokenizer).model,
            inputs,
            out,
            answers=AnswerOptions(max_new_tokens, answer_batch, skip_long=True),
            optimizer=optimizer,
            options=run,
            progress=bar,
            report=console.print,
        )
    loss, agreement, bleu = recipe["loss"], recipe["agreement"], recipe["bleu"]
    console.print(
        f"{recipe['parameters']:,} parameters, {recipe['steps']} steps in {recipe['seconds'] / 60:.1f} min; dev loss "
        f"{loss['before']:.3f} -> {loss['after']:.3f}, agreement with the large model {agreement['before']:.1%} -> "
        f"{agreement['after']:.1%}"
        + (f", BLEU {bleu['before']} -> {bleu['after']} (large model {bleu['large']})" if bleu else "")
        + f". Written to {out}."
    )
