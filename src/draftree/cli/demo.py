"""`draftree demo`: the embedded model answers seven kinds of prompt, plainly and with drafting, side by side."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from draftree.cli.options import DRAFTER, complete_drafter

WARM_PER_SET = 12


def demo(
    drafter: Annotated[str, typer.Option(help=DRAFTER, autocompletion=complete_drafter)] = "lookahead",
    max_new_tokens: Annotated[int, typer.Option(min=1, max=1024, help="Most tokens of an answer.")] = 96,
    cold: Annotated[bool, typer.Option("--cold", help="Start with an empty trie.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Show what drafting does on the embedded model, and prove that it changes no token."""
    from draftree.by_name import check_drafter, make_drafter

    check_drafter(drafter)
    from draftree import __version__, demo_model  # torch takes seconds, and a refusal none
    from draftree.cli.demo_view import View
    from draftree.models import encode_prompt
    from draftree.quiet import Quiet
    from draftree.showcase import KINDS, Scene, Showcase, figures

    begin = time.perf_counter()
    quiet = Quiet()
    fewer = quiet.choose_threads()
    model, tokenizer = demo_model()
    chosen = make_drafter(drafter, tokenizer, model)
    showcase = Showcase(model, lambda text: encode_prompt(tokenizer, text), chosen, max_new_tokens)
    view = View(tokenizer, drafter, quiet=as_json)
    view.opening(model, fewer)
    if drafter == "lookahead" and not cold:
        view.warming(showcase.warm(WARM_PER_SET), WARM_PER_SET * len(KINDS))
    scenes: list[Scene] = []
    for scene in showcase.run(view.watch, view.begin):
        scenes.append(scene)
        quiet.look()
        view.finish(scene)
    seconds, trouble = time.perf_counter() - begin, quiet.trouble()
    calm = trouble is None
    total = figures("total", scenes, quiet=calm)
    if as_json:
        shown = {"version": __version__, "drafter": drafter, "cold": cold}
        shown |= {"prompts": [scene.as_dict(quiet=calm) for scene in scenes], "total": total}
        print(json.dumps(shown | {"quiet": calm, "trouble": trouble, "seconds": seconds}, ensure_ascii=False))
    else:
        view.closing([figures(scene.kind, [scene], quiet=calm) for scene in scenes], total, seconds, trouble)
    if not total["equal"]:
        for scene in scenes:
            for way, where in scene.parted.items():
                typer.echo(f"{scene.kind}: the {way} answer {where}", err=True)
        raise typer.Exit(1)
