"""The campaign: random cases of everything together, each answered with a drafter, without one, and by Hugging Face.

Every answer with a drafter must be, token for token, that of plain decoding on the same runner; in float32 those of
plain decoding must be Hugging Face's own `generate`. Where one is not, the scores of the two tokens at the first
difference are computed by the stock model. A gap within the model's own rounding counts as a near-tie.

    python tests/campaign.py run --cases 20000 --out campaign.jsonl     writes a line for each case
    python tests/campaign.py show --seed 0 --case 17     draws one case again, answers it, and prints it
    python tests/campaign.py report *.jsonl      the tables of docs/reliability.md
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from campaign_cases import SHAPES, Case, drafter_of, draw, model_of, padded, pruner_of
from row_differences import worst_difference
from torch import Tensor

from draftree.acceptance.sampled import PrefixChooser
from draftree.drafting import Drafter
from draftree.engine import Engine, generate
from draftree.engine.sampling import params_for, read_options
from draftree.integrations import custom_generate
from draftree.runner import open_runner

FLOOR = 1e-4  # two scores that are closer may change places in float32 as well
DRAWS = 2000  # of rounding, to see whether it brings a token over an edge such as that of top_k

Answers = list[list[int]]


def answers(case: Case, drafter: Drafter | None) -> tuple[Answers, int]:
    """Return the case's answers up to their ends, and the number of accepted draft tokens."""
    model = model_of(case.family, case.dtype)
    ours: dict[str, Any] = {"drafter": drafter, "runner": case.runner, "strict": case.strict}
    if drafter is not None:
        ours |= {"shape": SHAPES[case.shape](), "pruner": pruner_of(case)}
    if case.through == "engine":
        return _through_engine(case, model, ours)
    ids, mask = padded(case)
    if case.through == "generate":
        out = generate(model, ids, mask, seed=case.seed, **ours, **case.options)
        sequences, accepted = out.sequences, out.stats.total.accepted
    else:
        stats: list[Any] = []
        loop = custom_generate(seed=case.seed, on_stats=stats.append, **ours)
        sequences = model.generate(ids, attention_mask=mask, custom_generate=loop, **_sampling(case), **case.options)
        accepted = stats[0].total.accepted
    return cut(case, sequences), accepted


def _sampling(case: Case) -> dict[str, Any]:
    return {} if "do_sample" in case.options else {"do_sample": False}


def _through_engine(case: Case, model: Any, ours: dict[str, Any]) -> tuple[Answers, int]:
    """Requests wait for slots; half of them arrive while others run."""
    with Engine(model, slots=case.slots, **ours) as engine:
        requests = []
        for b, prompt in enumerate(case.prompts):
            requests.append(engine.add(prompt, _params(case, b, [prompt])))
            if b % 2:
                engine.step()
        engine.run()
        for request in requests:
            if request.error is not None:
                raise request.error
        return [request.tokens for request in requests], sum(r.stats.accepted for r in requests)


def _params(case: Case, row: int, texts: Answers, mask: Tensor | None = None) -> Any:
    """Return the sampling parameters of request `row`, whose processors see `texts` as the prompt."""
    model = model_of(case.family, case.dtype)
    options = read_options(model, None, None, None, dict(case.options))
    return params_for(
        model,
        options,
        max_new_tokens=case.options["max_new_tokens"],
        padded_length=len(texts[0]),
        seed=case.seed + row,
        encoder_ids=torch.tensor(texts),
        mask=mask,
    )


def cut(case: Case, sequences: Tensor) -> Answers:
    """Return the new tokens of each row, up to its first EOS."""
    model = model_of(case.family, case.dtype)
    eos = case.options.get("eos_token_id", model.generation_config.eos_token_id)
    ends = {eos} if isinstance(eos, int) else set(eos or ())
    start = 1 if case.encoder_decoder else max(map(len, case.prompts))
    found = []
    for row in sequences[:, start:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        found.append(row[:end])
    return found


def hugging_face(case: Case) -> Answers | None:
    """Return Hugging Face's answers in float32: greedy, or sampled for a single prompt; None otherwise."""
    sampled = case.options.get("do_sample", False)
    if case.dtype != "float32" or (sampled and len(case.prompts) > 1):
        return None
    model = model_of(case.family, case.dtype)
    ids, mask = padded(case)
    if case.through == "engine" and len(case.prompts) > 1:  # processors see no padding there
        return [cut_alone(case, model, prompt) for prompt in case.prompts]
    torch.manual_seed(case.seed)
    return cut(case, model.generate(ids, attention_mask=mask, **_sampling(case), **case.options))


def cut_alone(case: Case, model: Any, prompt: list[int]) -> list[int]:
    """Return Hugging Face's greedy answer to one prompt."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **_sampling(case), **case.options)
    pad = torch.zeros(1, max(map(len, case.prompts)) - len(prompt), dtype=torch.long)
    return cut(case, torch.cat([pad, out], 1))[0]


# ------------------------------------------------------------------ where two answers part


def compare(case: Case, found: Answers, expected: Answers, what: str) -> Iterator[dict[str, Any]]:
    """Yield each row that differs: the position, and the gap between the scores of the two tokens."""
    for b, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one == other:
            continue
        at = next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))
        part: dict[str, Any] = {"what": what, "row": b, "at": at, "gap": None, "bound": None}
        if at < min(len(one), len(other)):
            part["gap"], part["bound"] = gap(case, b, other[:at], one[at], other[at])
        yield part


@functools.cache
def measured(family: str, dtype: str, runner: str) -> float:
    """Measure how far a raw score moves with the number of rows of a pass."""
    return worst_difference(open_runner(model_of(family, dtype), runner), row_by_row=False)


def rounding(case: Case, prompt: list[int], prefix: list[int]) -> float:
    """Return the largest difference between two raw scores that rounding explains.

    In 16 bits this is twice the larger of two errors: of the stock model's scores against float32, anywhere in the
    text, and of scores over the rows of a pass.
    """
    if case.dtype == "float32":
        return FLOOR
    with torch.no_grad():
        ids = torch.tensor([prompt + prefix])
        own, exact = (model_of(case.family, dtype)(input_ids=ids).logits for dtype in (case.dtype, "float32"))
    error = float((own.float() - exact).abs().max())
    return 2 * max(error, measured(case.family, case.dtype, case.runner))


def stretched(chooser: PrefixChooser) -> float:
    """Return how far processed scores move when raw scores move by 1."""
    stretch = 1.0
    for processor in chooser._processors:
        stretch /= float(getattr(processor, "temperature", 1.0))
        penalty = float(getattr(processor, "penalty", 1.0))
        stretch *= max(penalty, 1 / penalty)
    return stretch


def gap(case: Case, row: int, prefix: list[int], one: int, other: int) -> tuple[float, float]:
    """Return the gap between the scores of two tokens behind `prefix`, and the bound of rounding."""
    model = model_of(case.family, case.dtype)
    chooser, logits = _at(case, model, row, prefix)
    bound = rounding(case, case.prompts[row], prefix)
    stretch = stretched(chooser)
    scores = chooser._noisy(chooser.scores(logits), 0)[0].double()
    if case.options.get("do_sample", False):
        scores = scores.log()
    apart = abs(float(scores[one] - scores[other]))
    if apart <= bound * stretch:
        return apart, bound * stretch
    # One of the two may be cut off by top_k, top_p and their like: does rounding move it over the edge?
    generator = torch.Generator().manual_seed(0)
    for scale in (0.1, 0.5, 1.0):
        found = {int(scores.argmax())}
        for _ in range(DRAWS):
            moved = logits.float() + (torch.rand(logits.shape, generator=generator) * 2 - 1) * bound * scale
            found.add(int(chooser._noisy(chooser.scores(moved), 0).argmax()))
        if {one, other} <= found:
            return bound * stretch * scale, bound * stretch
    return apart, bound * stretch


def _at(case: Case, model: Any, row: int, prefix: list[int]) -> tuple[PrefixChooser, Tensor]:
    """Return a chooser behind `prefix` and the stock model's logits [V] there."""
    prompt = case.prompts[row]
    if case.encoder_decoder:
        start = [int(model.generation_config.decoder_start_token_id)]
        params = _params(case, row, [start])
        with torch.no_grad():
            decoded = torch.tensor([start + prefix])
            logits = model(input_ids=torch.tensor([prompt]), decoder_input_ids=decoded).logits[0, -1]
        seen = torch.tensor([start])
    else:
        ids, mask = padded(case)
        seen = torch.tensor([prompt]) if case.through == "engine" else ids[row : row + 1]
        params = _params(case, row, seen.tolist(), None if case.through == "engine" else mask[row : row + 1])
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + prefix])).logits[0, -1]
    generator = torch.Generator().manual_seed(case.seed + row)
    chooser = PrefixChooser(seen, params.processors, generator, params.sample)
    for token in prefix:
        chooser._noisy(torch.zeros(1, logits.shape[-1]), 0)
        chooser.push(token)
    return chooser, logits


# ------------------------------------------------------------------ cases


def attempt(case: Case) -> dict[str, Any]:
    """Answer a case in all ways and return its outcome as plain values."""
    found: dict[str, Any] = {"number": case.number, "row": case.row, "answers": len(case.prompts), "parts": []}
    found |= {"family": case.family, "drafter": case.drafter, "accepted": 0, "hugging_face": 0}
    try:
        plain, _ = answers(case, None)
        references = {tuple(prompt): answer for prompt, answer in zip(case.prompts, plain, strict=True)}
        drafter = drafter_of(case, references)
        for _ in range(1 + case.again):
            drafted, accepted = answers(case, drafter)
            found["accepted"] += accepted
            found["parts"] += compare(case, drafted, plain, "plain")
        stock = hugging_face(case)
        if stock is not None:
            found["hugging_face"] = len(stock)
            found["parts"] += compare(case, plain, stock, "Hugging Face")
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
        if case.strict and "strict=True cannot be kept" in str(error):
            found |= {"refused": True, "answers": 0}
    found["outcome"] = outcome(found)
    return found


def outcome(found: dict[str, Any]) -> str:
    """Return the outcome of a case: "equal", "near-tie", "differs", "error", or "refused" (strict mode)."""
    if found.get("refused"):
        return "refused"
    if "error" in found:
        return "error"
    if any(part["gap"] is None or part["gap"] > part["bound"] for part in found["parts"]):
        return "differs"
    return "near-tie" if found["parts"] else "equal"


def run(seed: int, numbers: Iterable[int], out: Path | None, say: Any = print) -> list[dict[str, Any]]:
    """Attempt the cases of these numbers, write a line for each to `out`, and return them."""
    cases = []
    with contextlib.nullcontext() if out is None else out.open("w", encoding="utf-8") as file:
        for number in numbers:
            found = attempt(draw(seed, number)) | {"seed": seed}
            cases.append(found)
            if file is not None:
                file.write(json.dumps(found) + "\n")
                file.flush()
            if found["outcome"] in ("differs", "error"):
                say(f"case {number}: {json.dumps(found)}")
    return cases


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the tables as plain values."""
    rows: dict[tuple[str, ...], Counter[str]] = {}
    gaps: dict[tuple[str, ...], float] = {}
    for one in found:
        row = tuple(one["row"])
        counts = rows.setdefault(row, Counter())
        counts["cases"] += 1
        counts["accepted"] += one["accepted"]
        counts[one["outcome"]] += 1
        counts["answers"] += one["answers"]
        counts["hugging_face"] += one["hugging_face"]
        for what in ("plain", "Hugging Face"):
            parted = {part["row"] for part in one["parts"] if part["what"] == what}
            counts[f"parted from {what}"] += len(parted)
        near = [part["gap"] for part in one["parts"] if part["gap"] is not None]
        gaps[row] = max([gaps.get(row, 0.0), *near])
    table = [dict(zip(("dtype", "runner", "strict"), row, strict=True)) | rows[row] for row in sorted(rows)]
    for line, row in zip(table, sorted(rows), strict=True):
        line["largest gap"] = gaps[row]
    total: Counter[str] = Counter(one["outcome"] for one in found)
    return {
        "cases": len(found),
        "seeds": sorted({one["seed"] for one in found}),
        "outcomes": dict(total),
        "table": table,
    }


def _of(count: int, parted: int) -> str:
    """Return how many of `count` answers are equal."""
    return f"all {count:,}" * bool(count) if not parted else f"{count - parted:,} of {count:,}"


def report(about: dict[str, Any]) -> list[str]:
    """Return the lines of the table in Markdown."""
    lines = [
        "| type | runner | | cases | equal to plain decoding | plain decoding equal to Hugging Face | largest gap |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in about["table"]:
        answers, parted = row["answers"], row.get("parted from plain", 0)
        theirs, others = row.get("hugging_face", 0), row.get("parted from Hugging Face", 0)
        refused = f", {row['refused']:,} refused" if row.get("refused") else ""
        cells = [row["dtype"], f"`{row['runner']}`", row["strict"], f"{row['cases']:,}{refused}"]
        cells += [_of(answers, parted), _of(theirs, others)]
        cells.append(f"{row['largest gap']:.1e}" if row["largest gap"] else "")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> int:
    """See the head of the file; 1 where a case differs or fails."""
    parser = argparse.ArgumentParser(description="The campaign of random cases.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    of_run = verbs.add_parser("run")
    of_run.add_argument("--cases", type=int, default=2000)
    of_run.add_argument("--out", type=Path, required=True)
    of_show = verbs.add_parser("show")
    of_show.add_argument("--case", type=int, required=True)
    for one in (of_run, of_show):
        one.add_argument("--seed", type=int, default=0)
    of_report = verbs.add_parser("report")
    of_report.add_argument("files", type=Path, nargs="+")
    of_report.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.verb == "show":
        case = draw(options.seed, options.case)
        print(case)
        found = [attempt(case)]
        print(json.dumps(found[0], indent=1))
    elif options.verb == "run":
        found = run(options.seed, range(options.cases), options.out)
    else:
        found = [json.loads(line) for path in options.files for line in path.read_text(encoding="utf-8").splitlines()]
        about = summary(found)
        if options.json is not None:
            options.json.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        print("\n".join(report(about)))
    print(dict(Counter(one["outcome"] for one in found)), file=sys.stderr)
    return int(any(one["outcome"] in ("differs", "error") for one in found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
