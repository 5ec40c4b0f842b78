"""`draftree trace`: record a run step by step, and look at a recorded one, as text or as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def trace(
    context: typer.Context,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="One prompt or several, answered together; '-' reads one from standard input."),
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Show this recorded run instead of recording one.", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="File for the record.")] = Path("trace.jsonl"),
    html: Annotated[
        Path | None, typer.Option(help="Also write the run as one self-contained page.", show_default=False)
    ] = None,
    step: Annotated[
        list[int] | None,
        typer.Option(min=1, help="With --replay, draw this step's tree; once for each.", show_default="all"),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model folder or hub name.", show_default="the embedded model")
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            show_default="lookahead",
            help="none, lookahead, prompt-lookup, jacobi, draft-model, medusa, bita, hidden-transfer, "
            "self-speculative, several joined by +, or the folder of a drafter or small model.",
        ),
    ] = None,
    bild: Annotated[
        str | None,
        typer.Option(help="LOSSY: this small model writes, MODEL corrects; a folder, or 'demo' (the embedded one's)."),
    ] = None,
    fallback_threshold: Annotated[
        float | None,
        typer.Option(help="Of --bild: MODEL takes over where no word is as likely as this.", show_default="0.6"),
    ] = None,
    rollback_threshold: Annotated[
        float | None,
        typer.Option(help="Of --bild: MODEL cuts the text where a word is further off; inf: never.", show_default="5"),
    ] = None,
    lossless: Annotated[bool, typer.Option("--lossless", help="Of --bild: keep only what MODEL says itself.")] = False,
    trie: Annotated[Path | None, typer.Option(help="Saved trie to draft from; it is left as it is.")] = None,
    early_head: Annotated[
        str | None,
        typer.Option(help="Prune trees inside the pass: folder of an early head, or 'demo' for the embedded model's."),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Always verify so many guesses.", show_default="sized by cost")
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Prompts answered at a time.", show_default="all of them")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 128,
    sample: Annotated[bool, typer.Option("--sample", help="Draw tokens instead of taking the best.")] = False,
    temperature: Annotated[float, typer.Option(help="Of the draw, with --sample.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw from the k best only.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Draw from the nucleus of this mass.")] = None,
    seed: Annotated[int, typer.Option(help="Of the draw; prompt b draws with seed + b.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template around the prompts.")] = False,
    host: Annotated[str, typer.Option(help="auto, loop or hooked.")] = "auto",
    strict: Annotated[bool, typer.Option("--strict", help="Decide near-ties again (16-bit models).")] = False,
) -> None:
    """Record how PROMPTS are answered: every step's tree, what was pruned, accepted and emitted, and its times."""
    from draftree.bench.models import encode_prompt, load_model
    from draftree.cli.common import (
        ask,
        check_bild,
        check_decoding,
        check_drafter,
        draw_options,
        make_bild,
        make_drafter,
        make_pruner,
        read_prompt,
        wide_console,
    )
    from draftree.cli.trace_view import outline, show
    from draftree.trace.file import read_trace, write_trace
    from draftree.trace.page import write_trace_page

    console = wide_console()
    for path in (out, html):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"There is no folder {path.parent} for {path.name}: make it, or name another.")
    if replay is not None:
        for name in context.params:
            given = context.get_parameter_source(name)
            if name not in ("replay", "html", "step") and given is not None and given.name == "COMMANDLINE":
                called = "the prompt" if name == "prompts" else f"--{name.replace('_', '-')}"
                raise ValueError(f"--replay shows a run that is recorded already: leave {called} out, or --replay.")
        recorded = read_trace(replay)
        if html is None or step:
            show(recorded, console, step or [])
        if html is not None:
            write_trace_page(recorded, html, f"draftree trace: {replay.name}")
            console.print(f"Written: {html}", markup=False, soft_wrap=True)
        return
    others = {"--drafter": drafter, "--trie": trie, "--early-head": early_head, "--nodes": nodes}
    check_bild(bild, fallback_threshold, rollback_threshold, lossless=lossless, others=others)
    drafter = drafter or "lookahead"
    check_drafter(drafter, trie)
    check_decoding(drafter, early_head, sample=sample, temperature=temperature, top_k=top_k, top_p=top_p)
    if not prompts:
        raise ValueError("Give a prompt to record the answer of, or --replay and a recorded run.")
    if step:
        raise ValueError("--step chooses what --replay draws: add --replay, or leave it out.")
    if nodes is not None and drafter == "none":
        raise ValueError("--nodes sizes a drafter's trees: name a drafter, or leave it out.")
    texts = [read_prompt(prompt) for prompt in prompts]
    if trie is not None and not trie.is_file():
        raise ValueError(f"There is no trie {trie}: make one by draftree generate --trie, or leave it out.")

    from draftree.engine.engine import Engine
    from draftree.engine.options import read_options
    from draftree.engine.recorder import Recorder
    from draftree.shaping import Fixed

    target, tokenizer = load_model(model)
    if bild is None:
        chosen = make_drafter(drafter, tokenizer, target, trie=trie)
    else:
        chosen = make_bild(bild, tokenizer, target, fallback_threshold, rollback_threshold, lossless=lossless)
    recorder = Recorder()
    engine = Engine(
        target,
        drafter=chosen,
        pruner=make_pruner(early_head, target),
        shape=None if nodes is None else Fixed(nodes),
        slots=slots or len(texts),
        host=host,
        strict=strict,
        recorder=recorder,
    )
    options = read_options(target, None, None, tokenizer, draw_options(sample, temperature, top_k, top_p))
    for b, text in enumerate(texts):
        ask(engine, options, encode_prompt(tokenizer, text, raw=raw), max_new_tokens, seed + b)
    engine.run()
    recorded = read_trace(write_trace(recorder, out, tokenizer))
    outline(recorded, console)
    written = [out]
    if html is not None:
        written.append(write_trace_page(recorded, html, f"draftree trace: {out.name}"))
    console.print("Written: " + ", ".join(str(path) for path in written), markup=False, soft_wrap=True)
