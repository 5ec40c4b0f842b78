"""What several verbs share: choosing a drafter, colouring text by who guessed it."""

from __future__ import annotations

import difflib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from draftree.bench.harness import Watcher
from draftree.trace.labels import Pieces

if TYPE_CHECKING:
    from draftree.bench.analysis_setup import Findings
    from draftree.engine import Engine, Request
    from draftree.engine.options import Options

PIPED_WIDTH = 120  # columns of tables in a file or pipe
REFRESH = 0.2  # seconds between drawings of a progress bar

GUESS_STYLES = {
    "prompt_lookup": "cyan",
    "lookahead": "green",
    "lookahead/prompt": "cyan",
    "lookahead/output": "green",
    "lookahead/both": "bold green",
    "medusa": "magenta",
    "bita": "magenta",
    "hidden-transfer": "magenta",
    "self-speculative": "magenta",
    "draft-model": "yellow",
    "bild-lossy": "yellow",
    "bild-lossless": "yellow",
    "jacobi": "yellow",
}
TRAINED = ("medusa", "bita", "hidden-transfer", "self-speculative", "draft-model")
SMALL_ONES = ("demo", "small")  # names of the embedded model's small one beside --bild
TUNED = ".json"  # ends the name of a file that draftree tune wrote
DRAFTERS = ("none", "lookahead", "prompt-lookup", "jacobi", *TRAINED)


def legend() -> Text:
    """What the colours of `ColouredText` mean."""
    return Text.assemble(
        "Colours: plain = the model's own token; ",
        ("green", GUESS_STYLES["lookahead/output"]),
        " = accepted guess from earlier answers; ",
        ("cyan", GUESS_STYLES["lookahead/prompt"]),
        " = from the prompt; ",
        ("bold", GUESS_STYLES["lookahead/both"]),
        " = from both; ",
        ("magenta", GUESS_STYLES["medusa"]),
        " = from a drafter inside the model; ",
        ("yellow", GUESS_STYLES["draft-model"]),
        " = from a small model, or from n-grams of the model's own.",
    )


def check_drafter(name: str, trie: Path | None = None) -> None:
    """Refuse what `make_drafter` cannot make, before a model is loaded.

    Raises:
        ValueError: no such drafter, or an option that does not belong to it.
    """
    parts = name.split("+")
    if len(parts) > 1 and not Path(name).is_dir():
        for part in parts:
            check_drafter(part)
            if part == "none":
                raise ValueError(f"{name!r} merges with no drafter: leave 'none' out.")
        if trie is not None and "lookahead" not in parts:
            raise ValueError(f"--trie belongs to the lookahead drafter, which is not in {name!r}: leave it out.")
        return
    if name.endswith(TUNED) and "+" not in name:
        if not Path(name).is_file():
            raise ValueError(f"There is no tuned choice {name!r}: give a file that draftree tune wrote.")
    elif name not in DRAFTERS and not Path(name).is_dir():
        near = difflib.get_close_matches(name, DRAFTERS, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        choice = f"{', '.join(DRAFTERS)}, several joined by +, the folder of a drafter or small model, or a tuned .json"
        raise ValueError(f"There is no drafter {name!r}: choose {choice}.{hint}")
    if trie is not None and name != "lookahead":
        raise ValueError(f"--trie belongs to the lookahead drafter, not to {name!r}: leave one of them out.")


def make_drafter(name: str, tokenizer: Any, model: Any, *, trie: Path | None = None) -> Any:
    """The drafter called `name` on the command line: one of `DRAFTERS`, or a folder that training wrote.

    A folder without `draftree_config.json` is taken for a small model of Hugging Face's; names joined by + are merged;
    a .json file is what `draftree tune` chose, its trees included.

    Args:
        name: those of `TRAINED` are the embedded model's.
        tokenizer: the model's.
        model: the target.
        trie: a saved trie for Lookahead.

    Raises:
        ValueError: no such drafter, one trained for another model, or an option that does not belong to it.
    """
    from draftree.drafting import DraftModel, Jacobi, Lookahead, Merge, PromptLookup
    from draftree.drafting.folder import CONFIG, demo_drafter, load_drafter
    from draftree.host import inspect_model

    check_drafter(name, trie)
    if "+" in name and not Path(name).is_dir():
        parts = name.split("+")
        return Merge([make_drafter(p, tokenizer, model, trie=trie if p == "lookahead" else None) for p in parts])
    if name in TRAINED:
        return demo_drafter(name, model)
    if name.endswith(TUNED):
        from draftree.bench.tune_file import load_tuned

        return load_tuned(name, model, tokenizer)
    if name not in DRAFTERS:
        if (Path(name) / "config.json").is_file() and not (Path(name) / CONFIG).is_file():
            return DraftModel.from_pretrained(name, tokenizer, dtype=inspect_model(model).dtype)
        return load_drafter(Path(name), model)
    if name == "lookahead":
        if trie is not None and trie.exists():
            return Lookahead.load(trie, tokenizer)
        return Lookahead()
    return {"prompt-lookup": PromptLookup, "jacobi": Jacobi}.get(name, lambda: None)()


def wide_console() -> Console:
    """A console without highlighting; of a fixed width where output is piped."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    return console


def show_findings(console: Console, findings: Findings, about: dict[str, Any], out: Path, group: str) -> None:
    """Print an experiment's tables and remarks, and write bench-GROUP-EXPERIMENT.json and .png into `out`."""
    from draftree.bench.findings_files import heading, write_json, write_png
    from draftree.bench.plot import has_matplotlib

    console.print(heading(about), markup=False)
    for one in findings.tables:
        console.print(one)
    for remark in findings.remarks:
        console.print(remark, markup=False)
    written = [write_json(findings, about, out, group)]
    if has_matplotlib():
        written.append(write_png(findings, about, out, group))
    else:
        console.print("No plot: it needs matplotlib, which pip install 'draftree\\[bench]' brings.")
    console.print("Written: " + ", ".join(str(path) for path in written), markup=False)


def read_prompt(prompt: str) -> str:
    """The prompt as typed, or standard input for "-"; bytes that are no UTF-8 become replacement characters.

    Raises:
        ValueError: nothing but spaces.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise ValueError("The prompt is empty: say what to answer, or give '-' and write it to standard input.")
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def check_decoding(
    drafter: str,
    early_head: str | None,
    *,
    sample: bool,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> None:
    """Refuse options of pruning without a drafter, and of drawing without a draw.

    Raises:
        ValueError: one of them.
    """
    if early_head is not None and drafter == "none":
        raise ValueError("--early-head prunes a drafter's guesses: name a drafter, or leave it out.")
    for option, given in (("--temperature", temperature != 1.0), ("--top-k", top_k), ("--top-p", top_p)):
        if given is not None and given is not False and not sample:
            raise ValueError(f"{option} shapes the draw of --sample: add --sample, or leave {option} out.")


def draw_options(sample: bool, temperature: float, top_k: int | None, top_p: float | None) -> dict[str, Any]:
    """The same options as `read_options` takes them."""
    return {
        "do_sample": sample,
        "temperature": temperature if sample else None,
        "top_k": top_k,
        "top_p": top_p,
    }


def check_bild(
    bild: str | None,
    fallback_threshold: float | None,
    rollback_threshold: float | None,
    *,
    lossless: bool,
    others: dict[str, Any],
) -> None:
    """Refuse options of --bild without it, and beside it those of `others` (by name) that were given.

    Raises:
        ValueError: one of them.
    """
    thresholds = {"--fallback-threshold": fallback_threshold, "--rollback-threshold": rollback_threshold}
    for option, value in (others if bild is not None else thresholds).items():
        if value is not None and bild is not None:
            raise ValueError(f"--bild brings its own guesses and its own rule for them: leave {option} out.")
        if value is not None:
            raise ValueError(f"{option} belongs to --bild: name a small model with --bild, or leave it out.")
    if bild is None and lossless:
        raise ValueError("--lossless belongs to --bild, and all else is lossless: leave it out.")


def make_bild(
    name: str,
    tokenizer: Any,
    model: Any,
    fallback_threshold: float | None,
    rollback_threshold: float | None,
    *,
    lossless: bool,
) -> Any:
    """BiLD of `model` and the small model called `name` on the command line.

    Args:
        name: a folder, or "demo" or "small" for the embedded model's own.
        tokenizer, model: the large model's.
        fallback_threshold, rollback_threshold: of `BiLD`; None for its default.
        lossless: of `BiLD`.

    Raises:
        ValueError: no such model, one that does not fit, or a threshold out of range.
    """
    from draftree.drafting import BiLD
    from draftree.drafting.bild import check_options
    from draftree.drafting.folder import demo_drafter
    from draftree.host import inspect_model

    given = {"fallback_threshold": fallback_threshold, "rollback_threshold": rollback_threshold}
    thresholds: dict[str, Any] = {option: value for option, value in given.items() if value is not None}
    check_options(**thresholds)
    if Path(name).is_dir():
        dtype = inspect_model(model).dtype
        return BiLD.from_pretrained(name, tokenizer, dtype=dtype, lossless=lossless, **thresholds)
    if name not in SMALL_ONES:
        raise ValueError(f"There is no small model {name!r}: give its folder, or 'demo' for the embedded model's.")
    return BiLD(demo_drafter("draft-model", model).model, lossless=lossless, **thresholds)


def ask(engine: Engine, options: Options, ids: list[int], max_new_tokens: int, seed: int) -> Request:
    """Add a prompt (token ids) to the engine; an encoder-decoder's encoder reads it.

    Raises:
        ValueError: a prompt that does not fit the model.
    """
    import torch

    from draftree.engine.limits import check_prompt, check_source
    from draftree.engine.options import rules_for

    target, source = engine.target, None
    if target.encoder_decoder:
        check_source(ids, target.model.get_input_embeddings().weight.shape[0], target.max_positions)
        source, ids = torch.tensor(ids), [options.decoder_start]
    check_prompt(ids, max_new_tokens, target.vocab_size, target.max_positions)
    rules = rules_for(
        target.model,
        options,
        max_new_tokens=max_new_tokens,
        padded_length=len(ids),
        seed=seed,
        encoder_ids=None if source is None else source[None],
    )
    return engine.add(ids, rules, encoder_input=source)


def make_pruner(name: str | None, model: Any) -> Any:
    """Early pruning by the head in folder `name`, or the embedded model's for "demo"; None for None.

    Raises:
        ValueError: no such folder, or a head of another model.
    """
    from draftree.pruning import EarlyHead, EarlyPruning, demo_early_head

    if name is None:
        return None
    head = demo_early_head(model) if name == "demo" else EarlyHead.from_pretrained(Path(name), model)
    return EarlyPruning(head)


def source_style(source: str | None) -> str:
    """A source's colour; bold where several merged drafters had the guess."""
    if source is None:
        return ""
    if "+" in source:
        return GUESS_STYLES["lookahead/both"]
    return GUESS_STYLES.get(source, "")


class ColouredText:
    """Grows a rich Text token by token; bytes of unfinished characters wait for the rest of theirs."""

    def __init__(self, tokenizer: Any) -> None:
        self.text = Text()
        self._pieces = Pieces(tokenizer)

    def add(self, token: int, source: str | None) -> Text:
        """Append a token in its source's colour; returns the piece of text that became printable."""
        coloured = Text(self._pieces.add(token), style=source_style(source))
        self.text.append_text(coloured)
        return coloured


class StageBar(Watcher):
    """Shows the stages of a measurement: a bar on a terminal, one line a stage where output is piped."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            # Drawn from step(), between measurements: a drawing thread would take time from what is measured.
            auto_refresh=False,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._drawn = 0.0

    def __enter__(self) -> StageBar:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def stage(self, name: str, total: int | None) -> None:
        """See `Watcher.stage`."""
        if not self._console.is_terminal:
            self._console.print(f"{name} ..." if total is None else f"{name}: {total} ...")
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(name, total=total)
        self._progress.refresh()

    def step(self) -> None:
        """See `Watcher.step`."""
        if self._task is None:
            return
        self._progress.advance(self._task)
        now = time.monotonic()
        if now - self._drawn > REFRESH:
            self._progress.refresh()
            self._drawn = now
