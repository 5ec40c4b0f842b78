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
        str,
        typer.Option(
            help="none, lookahead, prompt-lookup, jacobi, draft-model, medusa, bita, hidden-transfer, "
            "several joined by +, or the folder of a drafter or small model."
        ),
    ] = "lookahead",
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
    """Answer PROMPT. Accepted guesses are coloured; the text is what plain decoding would say."""
    from rich.console import Console

    from draftree.bench.models import encode_prompt, load_model
    from draftree.cli.common import (
        ColouredText,
        check_decoding,
        check_drafter,
        draw_options,
        legend,
        make_drafter,
        make_pruner,
        read_prompt,
    )
    from draftree.engine import RunStats
    from draftree.engine.engine import Engine
    from draftree.engine.limits import check_prompt
    from draftree.engine.options import read_options, rules_for

    check_drafter(drafter, trie)
    check_decoding(drafter, early_head, sample=sample, temperature=temperature, top_k=top_k, top_p=top_p)
    text = read_prompt(prompt)
    target, tokenizer = load_model(model)
    chosen = make_drafter(drafter, tokenizer, target, trie=trie)
    pruner = make_pruner(early_head, target)
    options = read_options(target, None, None, tokenizer, draw_options(sample, temperature, top_k, top_p))
    ids = encode_prompt(tokenizer, text, raw=raw)
    engine = Engine(target, drafter=chosen, pruner=pruner, slots=1, host=host, strict=strict)
    check_prompt(ids, max_new_tokens, engine.target.vocab_size, engine.target.max_positions)
    rules = rules_for(target, options, max_new_tokens=max_new_tokens, padded_length=len(ids), seed=seed)
    console = Console(highlight=False, soft_wrap=True)
    coloured = ColouredText(tokenizer)
    begin = time.perf_counter()
    request = engine.add(ids, rules)
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
