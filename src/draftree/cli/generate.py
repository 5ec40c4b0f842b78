"""`draftree generate`: stream the answer to one prompt, with accepted draft tokens coloured, or answer a file."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from draftree.cli.decoding import Asking, Constraint, Drafting, Running, ask, checked, opened, read_prompt
from draftree.cli.options import (
    MaxNewTokens,
    ModelFirst,
    RealModel,
    Where,
    check_file,
    chosen_model,
    grouped,
    is_model,
    the_model,
)

if TYPE_CHECKING:
    from draftree.engine import Engine, Request
    from draftree.prompts import Prompt


@grouped
def generate(
    *,
    first: ModelFirst = None,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; '-' reads it from standard input.", show_default=False)
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Answer each prompt of this file: JSON lines with 'prompt', 'question' or 'turns' (the first one). "
            "Prints JSON lines.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="With --prompts: output file.", show_default="standard output")
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, help="With --prompts: requests decoded together.", show_default="8")
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(help="Image file that the prompt shows; may be given again.", show_default=False),
    ] = None,
    model: RealModel = None,
    where: Where,
    drafting: Drafting,
    trie: Annotated[Path | None, "Trie file to draft from; the answer is added to it."] = None,
    max_new_tokens: MaxNewTokens = 128,
    constraint: Constraint,
    asking: Asking,
    running: Running,
    stats: Annotated[bool, "Print statistics at the end."] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Answer PROMPT, with MODEL if both are given. Accepted draft tokens are coloured.

    The text equals that of plain decoding, except with --bild.
    """
    from draftree.prompts import read_prompts

    if first is not None and prompt is None and prompts is None and not is_model(first):
        first, prompt = None, first
    if (prompt is None) == (prompts is None):
        raise ValueError("Give a prompt, or --prompts and a file of them.")
    model = the_model(first, model)
    for option, given in (("--out", out), ("--slots", slots)):
        if prompts is None and given is not None:
            raise ValueError(f"{option} has no effect without --prompts: add --prompts, or leave it out.")
    if image and (prompts is not None or asking.raw):
        raise ValueError("--image belongs to one prompt in the chat template: leave --prompts and --raw out.")
    if prompts is not None and out is None and stats:
        raise ValueError("--stats would mix with the answers on standard output: add --out, or leave it out.")
    grammar, drafting = checked(constraint, drafting, trie, asking, running, where)
    check_file(trie, "--trie")
    check_file(out, "--out", prompts=prompts, trie=trie, json_schema=constraint.json_schema, ebnf=constraint.ebnf)
    asked = [] if prompts is None else read_prompts(prompts)
    texts = [one.text for one in asked] or [read_prompt(prompt or "")]
    name = chosen_model(model, embedded=drafting.of_embedded)
    from draftree.grammar import GrammarError  # Torch is imported after the checks, which then answer at once.

    engine, tokenizer = opened(name, where, drafting, trie, running, slots=min(slots or 8, len(texts)))
    requests = []
    for b, text in enumerate(texts):
        try:
            requests.append(ask(engine, tokenizer, text, asking, max_new_tokens, grammar, b, image or ()))
        except GrammarError:  # The grammar is the same for all prompts.
            raise
        except ValueError as error:
            raise ValueError(f"Prompt {asked[b].id!r}: {error}" if asked else str(error)) from None
    with saved_trie(trie, engine.config.drafter, tokenizer):
        if asked:
            answer_file(engine, tokenizer, asked, requests, out)
        else:
            answer_one(engine, tokenizer, requests[0], as_json=as_json)
    if stats and (asked or not as_json):
        from draftree.cli.screen import legend, line_console
        from draftree.engine import RunStats

        run = RunStats([request.stats for request in requests], engine.runner.name)
        if len(requests) == 1:
            line_console().print(legend(run.total.accepted_by_source))
        run.summary()


@contextmanager
def saved_trie(trie: Path | None, drafter: Any, tokenizer: Any) -> Iterator[None]:
    """Save the trie at the end of the block, also after Ctrl-C."""
    from draftree.drafting import Lookahead
    from draftree.drafting.merge import parts_of

    try:
        yield
    finally:
        if trie is not None:
            parts_of(drafter, Lookahead)[0].save(trie, tokenizer)


def answer_one(engine: Engine, tokenizer: Any, request: Request, *, as_json: bool) -> None:
    """Stream an answer to the terminal, or print one JSON object."""
    from draftree.cli.screen import line_console, print_answer, source_style
    from draftree.detokenizer import Detokenizer

    console, text = line_console(), Detokenizer(tokenizer)
    begin = time.perf_counter()
    for emitted in engine.stream(request):
        piece = text.feed(emitted.token)
        if not as_json:
            print_answer(console, piece, source_style(emitted.source))
    if as_json:
        print(json.dumps(_described(request, tokenizer) | {"seconds": time.perf_counter() - begin}))
    else:
        print_answer(console, text.rest() + "\n")


def answer_file(
    engine: Engine, tokenizer: Any, prompts: Sequence[Prompt], requests: Sequence[Request], out: Path | None
) -> None:
    """Write one JSON line per prompt, in order, as soon as it is finished."""
    target: Any = nullcontext(sys.stdout) if out is None else out.open("w", encoding="utf-8")
    failed = 0
    with target as file:
        lines: TextIO = file
        for prompt, request in zip(prompts, requests, strict=True):
            about: dict[str, Any] = {"id": prompt.id, "set": prompt.set, "prompt": prompt.text}
            try:
                for _ in engine.stream(request):
                    pass  # Stepping one stream advances all requests.
            except Exception as error:  # Other answers continue.
                failed, about["error"] = failed + 1, str(error)
            print(json.dumps(about | _described(request, tokenizer), ensure_ascii=False), file=lines, flush=True)
    if failed:
        raise ValueError(f"{failed} of {len(prompts)} answers ended with an error: see 'error' in their lines.")


def _described(request: Request, tokenizer: Any) -> dict[str, Any]:
    return {
        "text": tokenizer.decode(request.tokens, skip_special_tokens=True),
        "token_ids": request.tokens,
        "sources": [emitted.source for emitted in request.output],
        "finish_reason": request.finish_reason,
        "stats": request.stats.as_dict(),
    }
