"""`draftree demo` and `draftree try`: answer plainly and with drafting, side by side, and compare the answers.

A terminal shows both texts as they grow. A pipe gets plain lines.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftree.cli.options import (
    DRAFTER,
    MaxNewTokens,
    ModelFirst,
    RealModel,
    Where,
    chosen_model,
    complete_drafter,
    grouped,
    the_model,
)

if TYPE_CHECKING:
    from draftree.cli.demo_view import View
    from draftree.showcase import Scene

DrafterName = Annotated[str, typer.Option(help=DRAFTER, autocompletion=complete_drafter)]


@grouped
def demo(
    *,
    model: RealModel = None,
    where: Where,
    drafter: DrafterName = "lookahead",
    max_new_tokens: Annotated[int, typer.Option(min=1, max=1024, help="Most tokens of an answer.")] = 96,
) -> None:
    """Answer questions with MODEL plainly and with drafting, and compare speed and tokens."""
    from draftree.by_name import check_drafter, make_drafter
    from draftree.registry import TRAINED, names_in

    check_drafter(drafter)
    where.check()
    from draftree.cli.demo_view import View  # Torch is imported after the checks, which then answer at once.
    from draftree.runner import pack_own
    from draftree.runner.weights.packed import parameter_count
    from draftree.showcase import QUESTIONS, embedded_questions, figures, side_by_side

    begin = time.perf_counter()
    name = chosen_model(model, embedded=any(part in TRAINED for part in names_in(drafter)))
    loaded, tokenizer = where.load(name)
    pack_own(loaded, "auto")
    chosen = make_drafter(drafter, tokenizer, loaded)
    questions = embedded_questions() if name is None else QUESTIONS
    view = View(tokenizer, drafter)
    view.opening(parameter_count(loaded), len(questions))
    scenes = _shown(side_by_side(loaded, tokenizer, chosen, questions, max_new_tokens, view, reference=True), view)
    seconds = time.perf_counter() - begin
    total = figures("total", scenes)
    view.closing([figures(scene.question.kind, [scene]) for scene in scenes], total, seconds)
    _fail_if_different(scenes)


def _shown(scenes: Iterable[Scene], view: View) -> list[Scene]:
    """Return the scenes, each shown as soon as it is finished."""
    found = []
    for scene in scenes:
        found.append(scene)
        view.finish(scene)
    return found


def _fail_if_different(scenes: Sequence[Scene]) -> None:
    for scene in scenes:
        for way, difference in scene.differences.items():
            typer.echo(f"{scene.question.kind}: the {way} answer {difference}", err=True)
    if any(scene.differences for scene in scenes):
        raise typer.Exit(1)


@grouped
def try_model(
    *,
    first: ModelFirst = None,
    prompt: Annotated[str | None, typer.Argument(help="The first question.", show_default="one for code")] = None,
    model: RealModel = None,
    where: Where,
    drafter: DrafterName = "lookahead",
    max_new_tokens: MaxNewTokens = 128,
) -> None:
    """Talk with MODEL for three turns, plainly and with drafting side by side, and compare time and tokens.

    The second and third turn ask for the same again with a change, and for a quotation.
    """
    from draftree.by_name import check_drafter, make_drafter
    from draftree.cli.decoding import read_prompt
    from draftree.registry import TRAINED, names_in

    if first is not None and prompt is None and " " in first.strip() and not Path(first).exists():
        first, prompt = None, first
    name = the_model(first, model)
    check_drafter(drafter)
    where.check()
    prompt = None if prompt is None else read_prompt(prompt)
    name = chosen_model(name, embedded=any(part in TRAINED for part in names_in(drafter)))
    from draftree.cli.demo_view import View  # Torch is imported after the checks, which then answer at once.
    from draftree.runner import pack_own
    from draftree.showcase import side_by_side, three_turns

    loaded, tokenizer = where.load(name)
    pack_own(loaded, "auto")
    chosen = make_drafter(drafter, tokenizer, loaded)
    view = View(tokenizer, drafter)
    view.explain()
    scenes = _shown(side_by_side(loaded, tokenizer, chosen, three_turns(prompt), max_new_tokens, view), view)
    view.verdict(scenes)
    _fail_if_different(scenes)
