"""`draftree generate`: answer one prompt, streaming, with accepted guesses in colour."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; '-' reads it from standard input.")],
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
    trie: Annotated[Path | None, typer.Option(help="Saved trie to draft from; the answer is added to it.")] = None,
    early_head: Annotated[
        str | None,
        typer.Option(help="Prune trees inside the pass: folder of an early head, or 'demo' for the embedded model's."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to emit.")] = 128,
    sample: Annotated[bool, typer.Option("--sample", help="Draw tokens instead of taking the best.")] = False,
    temperature: Annotated[float, typer.Option(help="Of the draw, with --sample.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw from the k best only.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Draw from the nucleus of this mass.")] = None,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template around the prompt.")] = False,
    host: Annotated[str, typer.Option(help="auto, loop or hooked.")] = "auto",
    strict: Annotated[bool, typer.Option("--strict", help="Decide near-ties again (16-bit models).")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print statistics afterwards.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Answer PROMPT. Accepted guesses are coloured; the text is what plain decoding would say, except with --bild."""
    from rich.console import Console

    from draftree.bench.models import encode_prompt, load_model
    from draftree.cli.common import (
        ColouredText,
        ask,
        check_bild,
        check_decoding,
        check_drafter,
        draw_options,
        legend,
        make_bild,
        make_drafter,
        make_pruner,
        read_prompt,
    )
    from draftree.engine import RunStats
    from draftree.engine.engine import Engine
    from draftree.engine.options import read_options

    others = {"--drafter": drafter, "--trie": trie, "--early-head": early_head}
    check_bild(bild, fallback_threshold, rollback_threshold, lossless=lossless, others=others)
    drafter = drafter or "lookahead"
    check_drafter(drafter, trie)
    check_decoding(drafter, early_head, sample=sample, temperature=temperature, top_k=top_k, top_p=top_p)
    text = read_prompt(prompt)
    target, tokenizer = load_model(model)
    if bild is None:
        chosen = make_drafter(drafter, tokenizer, target, trie=trie)
    else:
        chosen = make_bild(bild, tokenizer, target, fallback_threshold, rollback_threshold, lossless=lossless)
    pruner = make_pruner(early_head, target)
    options = read_options(target, None, None, tokenizer, draw_options(sample, temperature, top_k, top_p))
    ids = encode_prompt(tokenizer, text, raw=raw)
    engine = Engine(target, drafter=chosen, pruner=pruner, slots=1, host=host, strict=strict)
    console = Console(highlight=False, soft_wrap=True)
    coloured = ColouredText(tokenizer)
    begin = time.perf_counter()
    request = ask(engine, options, ids, max_new_tokens, seed)
    for emitted in engine.stream(request):
        piece = coloured.add(emitted.token, emitted.source)
        if not as_json:
            console.print(piece, end="")
    seconds = time.perf_counter() - begin
    if trie is not None:
        chosen.save(trie, tokenizer)
    if as_json:
        answer = {
            "text": coloured.text.plain,
            "token_ids": request.tokens,
            "sources": [e.source for e in request.output],
            "finish_reason": request.finish_reason,
            "seconds": seconds,
            "stats": request.stats.as_dict(),
        }
        print(json.dumps(answer))
        return
    console.print()
    if stats:
        console.print(legend())
        RunStats([request.stats]).summary()
