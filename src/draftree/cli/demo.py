"""`draftree demo` and `draftree try`: answer plainly and with drafting, side by side, and compare the answers.

A terminal shows both texts as they grow. A pipe gets plain lines.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftree.cli.decoding import Drafter, Drafting, Running, read_prompt
from draftree.cli.options import MaxNewTokens, ModelFirst, RealModel, Where, chosen_model, grouped, the_model

if TYPE_CHECKING:
    from draftree.cli.demo_view import View
    from draftree.showcase import Scene


@grouped
def demo(
    *,
    model: RealModel = None,
    where: Where,
    drafter: Drafter = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, max=1024, help="Most tokens of an answer.")] = 96,
) -> None:
    """Answer questions with MODEL plainly and with drafting, and compare speed and tokens."""
    begin = time.perf_counter()
    name, target, tokenizer, chosen, view = _loaded(model, where, Drafting(drafter))
    from draftree.runner.weights.packed import parameter_count
    from draftree.showcase import QUESTIONS, embedded_questions, figures, side_by_side

    questions = embedded_questions() if name is None else QUESTIONS
    view.opening(parameter_count(target), len(questions))
    scenes = _shown(side_by_side(target, tokenizer, chosen, questions, max_new_tokens, view, reference=True), view)
    seconds = time.perf_counter() - begin
    total = figures("total", scenes)
    view.closing([figures(scene.question.kind, [scene]) for scene in scenes], total, seconds)
    _fail_if_different(scenes)


@grouped
def try_model(
    *,
    first: ModelFirst = None,
    prompt: Annotated[str | None, typer.Argument(help="The first question.", show_default="one for code")] = None,
    model: RealModel = None,
    where: Where,
    drafter: Drafter = None,
    max_new_tokens: MaxNewTokens = 128,
) -> None:
    """Talk with MODEL for three turns, plainly and with drafting side by side, and compare time and tokens.

    The second and third turn ask for the same again with a change, and for a quotation.
    """
    if first is not None and prompt is None and " " in first.strip() and not Path(first).exists():
        first, prompt = None, first
    prompt = None if prompt is None else read_prompt(prompt)
    _, target, tokenizer, chosen, view = _loaded(the_model(first, model), where, Drafting(drafter))
    from draftree.showcase import side_by_side, three_turns

    view.explain()
    scenes = _shown(side_by_side(target, tokenizer, chosen, three_turns(prompt), max_new_tokens, view), view)
    view.verdict(scenes)
    _fail_if_different(scenes)


def _loaded(model: str | None, where: Where, drafting: Drafting) -> tuple[str | None, Any, Any, Any, View]:
    """Return the model's name, the model, its tokenizer, the drafter and a view."""
    drafting.check(None)
    where.check()
    name = chosen_model(model, embedded=drafting.of_embedded)
    from draftree.cli.demo_view import View  # Torch is imported after the checks, which then answer at once.

    target, tokenizer = where.load(name)
    Running().prepare(target)
    drafter = drafting.for_engine(target, tokenizer, None)["drafter"]
    return name, target, tokenizer, drafter, View(tokenizer, drafting.name)


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
