"""Declare the options of verbs that answer prompts: drafter, sampling, grammar and runner."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftree.cli.options import DRAFTER, UNDER_GRAMMARS, Runner, TopK, TopP, Where, complete_drafter
from draftree.errors import check_runner

if TYPE_CHECKING:
    from draftree.engine import Engine, Request
    from draftree.grammar import Grammar


Drafter = Annotated[
    str | None,
    typer.Option(
        help=DRAFTER,
        show_default=f"lookahead; {UNDER_GRAMMARS} where the verb takes grammars",
        autocompletion=complete_drafter,
    ),
]


@dataclass(frozen=True)
class Drafting:
    """The drafter and the pruner."""

    drafter: Drafter = None
    bild: Annotated[str | None, "LOSSY: BiLD with this small model: a folder, or 'demo' for the embedded model's."] = (
        None
    )
    fallback_threshold: Annotated[
        float | None,
        typer.Option(
            help="With --bild: MODEL takes over below this probability of the best token.",
            show_default="0.6",
        ),
    ] = None
    rollback_threshold: Annotated[
        float | None,
        typer.Option(help="With --bild: roll back tokens of larger cross-entropy; inf: never.", show_default="5"),
    ] = None
    lossless: Annotated[bool, "With --bild: accept only tokens that MODEL would choose."] = False
    early_head: Annotated[
        str | None, "Prune trees inside the pass: folder of an early head, or 'demo' for the embedded model's."
    ] = None

    def under_grammars(self) -> Drafting:
        """Return these options with the default drafter under a grammar, unless one was named."""
        return self if self.drafter is not None or self.bild is not None else replace(self, drafter=UNDER_GRAMMARS)

    @property
    def name(self) -> str:
        """Return the name of the drafter."""
        return "lookahead" if self.drafter is None else self.drafter

    @property
    def of_embedded(self) -> bool:
        """Return whether an option names a part trained for the embedded model."""
        from draftree.registry import TRAINED, names_in

        trained = any(part in TRAINED for part in names_in(self.name))
        return trained or self.early_head == "demo" or self.bild == "demo"

    def check(self, trie: Path | None, nodes: int | None = None) -> None:
        """Raise a ValueError for an unknown drafter, and for options that would have no effect."""
        from draftree.by_name import check_drafter

        thresholds = {"--fallback-threshold": self.fallback_threshold, "--rollback-threshold": self.rollback_threshold}
        others = {"--drafter": self.drafter, "--trie": trie, "--early-head": self.early_head, "--nodes": nodes}
        for option, value in (thresholds if self.bild is None else others).items():
            if value is not None and self.bild is not None:
                raise ValueError(f"--bild drafts by itself: leave {option} out.")
            if value is not None:
                raise ValueError(f"{option} belongs to --bild: name a small model with --bild, or leave it out.")
        if self.bild is None and self.lossless:
            raise ValueError("--lossless belongs to --bild; other drafters are lossless: leave it out.")
        check_drafter(self.name, trie)
        if self.early_head is not None and self.name == "none":
            raise ValueError("--early-head prunes a drafter's trees: name a drafter, or leave it out.")
        if nodes is not None and self.name == "none":
            raise ValueError("--nodes sizes a drafter's trees: name a drafter, or leave it out.")

    def for_engine(self, target: Any, tokenizer: Any, trie: Path | None) -> dict[str, Any]:
        """Return `drafter` and `pruner` for an `Engine` of `target`."""
        from draftree.by_name import make_bild, make_drafter, make_pruner

        if self.bild is None:
            drafter = make_drafter(self.name, tokenizer, target, trie=trie)
        else:
            thresholds = self.fallback_threshold, self.rollback_threshold
            drafter = make_bild(self.bild, tokenizer, target, *thresholds, lossless=self.lossless)
        return {"drafter": drafter, "pruner": make_pruner(self.early_head, target)}


@dataclass(frozen=True)
class Sampling:
    """Greedy decoding or sampling."""

    sample: Annotated[bool, "Sample; the default is greedy decoding."] = False
    temperature: Annotated[float, "With --sample: temperature."] = 1.0
    top_k: TopK = None
    top_p: TopP = None
    seed: Annotated[int, "With --sample: seed. Prompt b of several uses seed + b."] = 0

    def check(self) -> None:
        """Raise a ValueError for sampling options without --sample, and for values out of range."""
        sampled = {"--temperature": self.temperature != 1.0 or None, "--top-k": self.top_k, "--top-p": self.top_p}
        for option, given in sampled.items():
            if given is not None and not self.sample:
                raise ValueError(f"{option} has no effect without --sample: add --sample, or leave {option} out.")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"--temperature is {self.temperature:g}: give a number over 0, or leave --sample out.")

    def given(self) -> dict[str, Any]:
        """Return the options by Hugging Face's names."""
        temperature = self.temperature if self.sample else None
        return {"do_sample": self.sample, "temperature": temperature, "top_k": self.top_k, "top_p": self.top_p}


@dataclass(frozen=True)
class Asking(Sampling):
    """Sampling, and the form of the prompt."""

    system: Annotated[str | None, typer.Option(help="System message.", show_default="none")] = None
    raw: Annotated[bool, "Pass the prompt without a chat template."] = False

    def check(self) -> None:
        """Raise a ValueError for a system message without a template, and as `Sampling` does."""
        super().check()
        if self.raw and self.system is not None:
            raise ValueError("--raw leaves out the chat template, which --system is a message of: leave one out.")


@dataclass(frozen=True)
class Running:
    """The runner of forward passes."""

    runner: Runner = "auto"
    pack: Annotated[
        bool,
        typer.Option(
            "--pack/--no-pack",
            help="Pack a large model's weights in place for the cpu runner; --no-pack is slower.",
        ),
    ] = True
    strict: Annotated[bool, "16-bit models: the exact bits of plain decoding, or an error."] = False

    def check(self) -> None:
        """Raise a ValueError for an unknown runner, or one that contradicts --no-pack."""
        check_runner(self.runner)
        if not self.pack and self.runner not in ("auto", "hooked", "in_place"):
            raise ValueError(
                f"--no-pack leaves the weights as they are, and --runner {self.runner} copies them: leave one out."
            )

    @property
    def name(self) -> str:
        """Return the runner for an `Engine`."""
        return "in_place" if self.runner == "auto" and not self.pack else self.runner

    def prepare(self, model: Any) -> None:
        """Pack the weights of a model that was loaded for this verb, if the runner would copy them."""
        from draftree.runner import pack_own

        pack_own(model, self.name)


@dataclass(frozen=True)
class Constraint:
    """The grammar of the answer; at most one option may be given."""

    json_schema: Annotated[
        Path | None, typer.Option(help="Answer in JSON of the schema in this file.", show_default=False)
    ] = None
    regex: Annotated[
        str | None, typer.Option(help="Answer with a match of this regular expression.", show_default=False)
    ] = None
    ebnf: Annotated[
        Path | None,
        typer.Option(help="Answer by the grammar (GBNF or Lark) in this file.", show_default=False),
    ] = None
    choice: Annotated[list[str] | None, "Answer with this text; repeat the option for several choices."] = None

    def grammar(self) -> Grammar | None:
        """Return the grammar, or None; raise a ValueError for two grammars, and an OSError for an unreadable file."""
        given = [f"--{name.replace('_', '-')}" for name, value in vars(self).items() if value not in (None, [])]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} both constrain the answer: give one of them.")
        if not given:
            return None
        file = self.json_schema or self.ebnf
        text = None if file is None else file.read_text("utf-8")
        from draftree.grammar import Grammar  # Torch is imported after the file is found.

        if self.regex is not None:
            return Grammar.regex(self.regex)
        if text is not None:
            return Grammar.json_schema(text) if self.ebnf is None else Grammar.ebnf(text)
        return Grammar.choice(self.choice or [])


def checked(
    constraint: Constraint, drafting: Drafting, trie: Path | None, *blocks: Any, nodes: int | None = None
) -> tuple[Grammar | None, Drafting]:
    """Check all options of a verb; return the grammar, and the drafting with the default of the grammar."""
    grammar = constraint.grammar()
    drafting = drafting if grammar is None else drafting.under_grammars()
    drafting.check(trie, nodes)
    for block in blocks:
        block.check()
    return grammar, drafting


def opened(
    model: str | None, where: Where, drafting: Drafting, trie: Path | None, running: Running, **options: Any
) -> tuple[Engine, Any]:
    """Load a model; return an engine with the other `options` of `Engine`, and the tokenizer."""
    from draftree.engine.engine import Engine

    target, tokenizer = where.load(model)
    running.prepare(target)
    parts = drafting.for_engine(target, tokenizer, trie)
    return Engine(target, **parts, runner=running.name, strict=running.strict, **options), tokenizer


def read_prompt(prompt: str) -> str:
    """Return the prompt, or standard input for "-"; bytes outside UTF-8 become replacement characters."""
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise ValueError("The prompt is empty: give a text, or '-' to read it from standard input.")
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def ask(
    engine: Engine,
    tokenizer: Any,
    prompt: str,
    asking: Asking,
    max_new_tokens: int,
    grammar: Grammar | None = None,
    number: int = 0,
    images: Sequence[Path] = (),
) -> Request:
    """Add a prompt to the engine, sampled with seed + `number`; an encoder-decoder gets it as encoder input."""
    import torch

    from draftree.engine.limits import check_source, decoder_start
    from draftree.models import encode_prompt, encode_seen, seen_content
    from draftree.runner.images import check_family
    from draftree.runner.target import rows_of

    target, inputs = engine.target, None
    if images:
        check_family(target)
        turns = [("system", asking.system), ("user", seen_content(prompt, images))]
        messages = [{"role": role, "content": content} for role, content in turns if content is not None]
        ids, inputs = encode_seen(tokenizer, messages)
    else:
        ids = encode_prompt(tokenizer, prompt, raw=asking.raw, system=asking.system)
    options = asking.given() | {"max_new_tokens": max_new_tokens, "seed": asking.seed + number}
    options |= {"grammar": grammar, "tokenizer": tokenizer}
    if not target.encoder_decoder:
        return engine.add(ids, inputs=inputs, **options)
    check_source(ids, rows_of(target.model), target.max_positions)
    start = decoder_start(target.model.generation_config)
    return engine.add([start], encoder_input=torch.tensor(ids, dtype=torch.long, device="cpu"), **options)
