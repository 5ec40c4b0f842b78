"""`draftree demo`: answer questions plainly and with drafting, side by side, and compare the answers.

A terminal shows both texts as they grow. A pipe gets plain lines.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from draftree.cli.options import DRAFTER, RealModel, Where, chosen_model, complete_drafter, grouped


@grouped
def demo(
    *,
    model: RealModel = None,
    where: Where,
    drafter: Annotated[str, typer.Option(help=DRAFTER, autocompletion=complete_drafter)] = "lookahead",
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
    from draftree.showcase import QUESTIONS, Scene, Showcase, embedded_questions, figures

    begin = time.perf_counter()
    name = chosen_model(model, embedded=any(part in TRAINED for part in names_in(drafter)))
    loaded, tokenizer = where.load(name)
    pack_own(loaded, "auto")
    chosen = make_drafter(drafter, tokenizer, loaded)
    showcase = Showcase(loaded, tokenizer, chosen, max_new_tokens)
    questions = embedded_questions() if name is None else QUESTIONS
    view = View(tokenizer, drafter)
    view.opening(parameter_count(loaded), len(questions))
    scenes: list[Scene] = []
    for scene in showcase.run(questions, view.watch, view.begin):
        scenes.append(scene)
        view.finish(scene)
    seconds = time.perf_counter() - begin
    total = figures("total", scenes)
    view.closing([figures(scene.question.kind, [scene]) for scene in scenes], total, seconds)
    if not total["equal"]:
        for scene in scenes:
            for way, difference in scene.differences.items():
                typer.echo(f"{scene.question.kind}: the {way} answer {difference}", err=True)
        raise typer.Exit(1)
