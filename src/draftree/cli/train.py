"""Declare `draftree train`: make data with the model itself, and train the drafters inside it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from draftree.cli.options import DataSet, Longest, MaxNewTokens, Model, Where, check_folder, grouped
from draftree.errors import install
from draftree.training.options import EPOCHS, Inputs, TrainOptions, check_out

app = typer.Typer(name="train", help="Make training data and train drafters inside the model.", no_args_is_help=True)


@dataclass(frozen=True)
class Material:
    """Name the data, the model and the folder of the result."""

    data: DataSet
    out: Annotated[Path, "Folder for what is trained, its recipe, curve and checkpoints."]
    model: Model = None


@dataclass(frozen=True)
class Run(TrainOptions):
    """Declare the options of a training run as the terminal shows them."""

    epochs: Annotated[float | None, typer.Option(help="Passes over the data.", show_default=f"{EPOCHS:g}")] = None
    learning_rate: Annotated[
        float | None, typer.Option(help="Peak learning rate.", show_default="the method's own")
    ] = None
    max_length: Longest = None
    bf16: Annotated[
        bool | None, typer.Option("--bf16/--fp32", help="Mixed precision.", show_default="where the device has it")
    ] = None

    def begin(self, out: Path) -> None:
        """Check accelerate and the folder `out` before anything is loaded.

        Raises:
            ValueError: accelerate is missing, or `out` is not writable or holds a finished result.
        """
        if find_spec("accelerate") is None:
            raise ValueError(f"Training needs accelerate: {install('train')}.")
        check_folder(out)
        if not self.resume:
            check_out(out, force=self.force)


@dataclass(frozen=True)
class MethodRun(Run):
    """Declare the options of a run for drafters inside the model."""

    splits: Annotated[
        int | None,
        typer.Option(min=0, help="Split points of a row and pass; 0 for all.", show_default="the method's"),
    ] = None
    half: Annotated[bool, "Store the weights in fp16."] = False


@app.command("data")
@grouped
def data(
    *,
    questions: Annotated[
        list[Path] | None, typer.Argument(help="JSON lines with questions, or folders of them.", show_default=False)
    ] = None,
    out: Annotated[Path, "Folder for the data set; an unfinished one is finished."],
    model: Model = None,
    where: Where,
    given: Annotated[
        list[Path] | None,
        typer.Option(
            help="Use these prompts with their answers too: JSON lines, or dialogues as ShareGPT's. May be repeated."
        ),
    ] = None,
    template: Annotated[
        list[str] | None,
        typer.Option(
            help="full, short, or a text with {question} in it. May be repeated: a row for each.", show_default="short"
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="System message of the full template.", show_default="a plain one")
    ] = None,
    max_new_tokens: MaxNewTokens = 256,
    limit: Annotated[int | None, typer.Option(min=1, help="Most questions, taken evenly from the files.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Questions answered together.")] = 8,
    workers: Annotated[int, typer.Option(min=1, help="Processes, by Ray Data; 1 does without Ray.")] = 1,
) -> None:
    """Let the model answer QUESTIONS greedily; the answers are what its drafters train on."""
    from draftree.training.options import SYSTEM, Template, read_given, read_questions

    kinds = list(dict.fromkeys(template or ["short"]))
    if system is not None and "full" not in kinds:
        raise ValueError("--system belongs to the template 'full': add --template full, or leave --system out.")
    if not questions and not given:
        raise ValueError("There is nothing to learn from: name files of QUESTIONS, or --given FILE with answers.")
    asked = read_questions(questions, limit) if questions else []
    asked += read_given(given, limit, len(asked)) if given else []
    check_folder(out)
    from draftree.cli.screen import DataBar, line_console
    from draftree.training.answers import AnswerOptions, make_data  # This import of torch takes seconds.

    target, tokenizer = where.load(model)
    how = [Template(kind, tokenizer, SYSTEM if system is None else system) for kind in kinds]
    options = AnswerOptions(max_new_tokens, batch)
    answer = None
    if workers > 1:
        from draftree.training.answers import RayAnswers

        answer = RayAnswers(model, options, workers, where.threads, where.placement)
    console = line_console()
    with DataBar(console, f"{out} holds the answers so far: the same command continues") as bar:
        more: dict[str, Any] = {"options": options, "progress": bar, "answer": answer}
        about = make_data(target, tokenizer, asked, out, template=how, **more)
    skipped = f", {about['skipped']} questions left out as too long" if about["skipped"] else ""
    console.print(f"{about['rows']} rows, {about['answer_tokens']} answer tokens in {out}{skipped}")


@app.command("bita")
@grouped
def bita(
    *,
    material: Material,
    where: Where,
    masks: Annotated[int, "M, tokens drafted ahead."] = 3,
    prompts: Annotated[int, "P, prompts that masks alone see; 0 for none."] = 16,
    prompting: Annotated[
        str, "What prompts are: deep (keys and values of each layer) or shallow (embeddings)."
    ] = "deep",
    prefix_dropout: Annotated[float, "Dropout of the prompts."] = 0.1,
    run: MethodRun,
) -> None:
    """Train mask embeddings and prompts (BiTA)."""
    settings = {"masks": masks, "prompts": prompts, "prompting": prompting}
    _train("bita", material, where, run, settings, {"prefix_dropout": prefix_dropout})


@app.command("hidden-transfer")
@grouped
def hidden_transfer(
    *,
    material: Material,
    where: Where,
    layers: Annotated[
        list[int] | None,
        typer.Option("--layer", help="t_i; once for each step.", show_default="those of the paper, scaled"),
    ] = None,
    masked: Annotated[bool, "Pseudo states do not see each other (ablation)."] = False,
    on_pseudo: Annotated[bool, "Train later steps on earlier pseudo states, as inference has them."] = False,
    run: MethodRun,
) -> None:
    """Train transfer matrices in mid-stack (Hidden Transfer)."""
    settings = {"transfer_layers": layers or None, "masked": masked}
    _train("hidden-transfer", material, where, run, settings, {"on_pseudo": on_pseudo})


@app.command("medusa")
@grouped
def medusa(
    *,
    material: Material,
    where: Where,
    heads: Annotated[int, "Tokens drafted ahead."] = 4,
    layers: Annotated[int, "Residual blocks of a head."] = 1,
    own_head: Annotated[
        bool, typer.Option("--own-head/--shared-head", help="A vocabulary projection for each head, or the model's.")
    ] = False,
    decay: Annotated[float, "Weight of a head's loss relative to the one before."] = 1.0,
    run: MethodRun,
) -> None:
    """Train heads on the last hidden state (Medusa, BPD)."""
    settings = {"heads": heads, "layers": layers, "own_head": own_head}
    _train("medusa", material, where, run, settings, {"decay": decay})


DraftVocab = Annotated[int, "Tokens that the head can draft: the data's most frequent."]
Decay = Annotated[float, "Weight of a depth's loss relative to the one before."]


@dataclass(frozen=True)
class HeadRun(Run):
    """Declare the options of a run for heads on recorded hidden states."""

    states: Annotated[
        Path | None,
        typer.Option(help="Folder of recorded hidden states, for all heads of this data.", show_default="in --out"),
    ] = None


@app.command("eagle3")
@grouped
def eagle3(
    *,
    material: Material,
    where: Where,
    depth: Annotated[int, "Tokens that it learns to draft one after the other."] = 4,
    draft_vocab: DraftVocab = 8192,
    embeddings: Annotated[bool, "Store the model's embeddings too, for speculators' own loader."] = False,
    source: Annotated[
        str | None,
        typer.Option("--from", help="Folder or hub name of an EAGLE-3 head to go on from.", show_default="a new head"),
    ] = None,
    decay: Decay = 0.8,
    run: HeadRun,
) -> None:
    """Train an EAGLE-3 head, saved in the format of speculators."""
    settings = {"depth": depth, "draft_vocab": draft_vocab, "embeddings": embeddings, "source": source}
    _train("eagle3", material, where, run, settings, {"decay": decay})


@app.command("dflash")
@grouped
def dflash(
    *,
    material: Material,
    where: Where,
    depth: Annotated[int, "Tokens that a block drafts."] = 7,
    layers: Annotated[int, "Decoder layers of the head."] = 2,
    draft_vocab: DraftVocab = 8192,
    anchors: Annotated[int, "Blocks of a row and pass."] = 24,
    decay: Decay = 0.8,
    run: HeadRun,
) -> None:
    """Train a DFlash head, saved in the format of speculators."""
    settings = {"depth": depth, "draft_vocab": draft_vocab, "layers": layers}
    _train("dflash", material, where, run, settings, {"decay": decay, "anchors": anchors})


@app.command("early-head")
@grouped
def early_head(
    *,
    material: Material,
    where: Where,
    layer: Annotated[int, "n, layers that have run."] = 4,
    rank: Annotated[int, "Of the projection; 0 for a full one."] = 0,
    places: Annotated[int, "Tokens predicted, the next one first; pruning needs that alone."] = 1,
    run: MethodRun,
) -> None:
    """Train a head after an early layer, for pruning (ProPD)."""
    _train("early-head", material, where, run, {"layer": layer, "rank": rank, "places": places}, {})


def _train(
    method: str, material: Material, where: Where, run: Run, settings: dict[str, Any], training: dict[str, Any]
) -> None:
    run.begin(material.out)
    import torch

    from draftree.cli.screen import resumable
    from draftree.training.run import train

    target, _ = where.load(material.model)
    with resumable(material.out) as report:
        recipe = train(
            method,
            target,
            material.data,
            material.out,
            settings=settings,
            training=training,
            options=run,
            splits=run.splits if isinstance(run, MethodRun) else None,
            states=run.states if isinstance(run, HeadRun) else None,
            dtype=torch.float16 if isinstance(run, MethodRun) and run.half else None,
            report=report,
        )
    if int(os.environ.get("RANK", "0")):  # Under accelerate launch, the first process alone reports.
        return
    top = ", ".join(f"{depth} {shares[0]:.1%}" for depth, shares in recipe["accuracy"].items())
    report(
        f"{recipe['parameters']:,} parameters, {recipe['steps']} steps in {recipe['seconds'] / 60:.1f} min; top-1 on "
        f"the dev rows: {top}. Written to {material.out}."
    )


@dataclass(frozen=True)
class AlignRun(Run):
    """Declare the options of a run for a whole small model."""

    batch: Annotated[int, "Rows of a pass, on each device."] = 32
    learning_rate: Annotated[
        float | None, typer.Option(help="From first to last.", show_default="1e-3; adamw 3e-4")
    ] = None


@app.command("align")
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
    run.begin(out)
    where.check()
    from draftree.checkpoints import known_folder
    from draftree.cli.screen import DataBar, line_console
    from draftree.drafting import DraftModel
    from draftree.training.align import align_on_inputs
    from draftree.training.answers import AnswerOptions

    console = line_console()
    resuming = f"{out} holds the work so far: the same command continues the answers, --resume the training"
    with DataBar(console, resuming) as bar:
        large, tokenizer = where.load(model)
        recipe = align_on_inputs(
            large,
            tokenizer,
            DraftModel.from_pretrained(known_folder(small), tokenizer).model,
            inputs,
            out,
            answers=AnswerOptions(max_new_tokens, answer_batch),
            optimizer=optimizer,
            options=run,
            progress=bar,
            report=console.print,
        )
    loss, agreement = recipe["loss"], recipe["agreement"]
    console.print(
        f"{recipe['parameters']:,} parameters, {recipe['steps']} steps in {recipe['seconds'] / 60:.1f} min; dev loss "
        f"{loss['before']:.3f} -> {loss['after']:.3f}, agreement with the large model {agreement['before']:.1%} -> "
        f"{agreement['after']:.1%}. Written to {out}."
    )
