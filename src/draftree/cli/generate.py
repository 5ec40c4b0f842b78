"""`draftree generate`: answer one prompt, streaming, with accepted draft tokens in colour."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from draftree.cli.constraint import Constraint, compiled
from draftree.cli.decoding import Choosing, Drafting, ask, read_prompt
from draftree.cli.options import MaxNewTokens, Model, check_file, grouped
from draftree.cli.where import Where


@grouped
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; '-' reads it from standard input.")],
    *,
    model: Model = None,
    where: Where,
    drafting: Drafting,
    trie: Annotated[Path | None, typer.Option(help="Saved trie to draft from; the answer is added to it.")] = None,
    max_new_tokens: MaxNewTokens = 128,
    constraint: Constraint,
    choosing: Choosing,
    stats: Annotated[bool, typer.Option("--stats", help="Print statistics afterwards.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Answer PROMPT, by a grammar where one is given. Accepted draft tokens are coloured.

    The text is that of plain decoding, except with --bild.
    """
    from draftree.cli.colours import ColouredText, legend
    from draftree.cli.screen import line_console
    from draftree.drafting import Lookahead
    from draftree.drafting.merge import parts_of
    from draftree.engine import RunStats
    from draftree.engine.engine import Engine
    from draftree.models import encode_prompt

    grammar = constraint.grammar()
    drafting = drafting if grammar is None else drafting.under_grammars()
    drafting.check(trie)
    check_file(trie, "--trie")
    choosing.check()
    where.check()
    text = read_prompt(prompt)
    target, tokenizer = where.load(model)
    parts = drafting.for_engine(target, tokenizer, trie)
    options = choosing.options(target, tokenizer)
    own = compiled(grammar, target, tokenizer, options)
    ids = encode_prompt(tokenizer, text, raw=choosing.raw)
    engine = Engine(target, **parts, slots=1, runner=choosing.runner, strict=choosing.strict)
    console = line_console()
    coloured = ColouredText(tokenizer)
    begin = time.perf_counter()
    request = ask(engine, options, ids, max_new_tokens, choosing.seed, own)
    try:
        for emitted in engine.stream(request):
            piece = coloured.add(emitted.token, emitted.source)
            if not as_json:
                console.print(piece, end="")
    finally:
        if trie is not None:  # also where Ctrl-C ends the answer
            parts_of(parts["drafter"], Lookahead)[0].save(trie, tokenizer)
    seconds = time.perf_counter() - begin
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
