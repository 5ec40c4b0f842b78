"""The table of claims: what the papers say of one way over another, and what was measured here.

`make results` writes claims.md from `claims.toml` and the kept result files that hold a table of comparisons. The
interval alone decides the verdict.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.harness.comparisons import CLAIMED
from benchmarks.harness.tables import markdown
from draftree.bench.measure import FEWEST
from draftree.bench.report import Table

HERE = Path(__file__).parent
PAGE = HERE / "claims.md"
CONFIRMED, UNDECIDED, OPPOSITE, TOO_FEW = "confirmed", "undecided", "opposite here", "too few"
VERDICTS = (CONFIRMED, UNDECIDED, OPPOSITE, TOO_FEW)
REAL, OTHERS = "SmolLM2-135M", "small models"  # columns
PAIR = "T5 pair"  # how the model of BiLD's own case begins
HEAD = f"""# What the papers claim, measured here

Made by `make results` from `claims.toml` and the files in `benchmarks/results/`. What the five papers say of one way
of decoding, or one setting, over another, where it does not depend on hardware alone: a ratio of the two with its 95 %
bootstrap interval over prompts, or over batches of them, where there are seven or more. Left out is what they say of
one text or model over another: code gains more, and so do larger models.
*Confirmed*: the whole interval is above 1 (or what the line names); *opposite here*: all of it is below, with the
reason where one was measured; *undecided*: it holds 1; *too few*: under seven prompts or batches, which leave no
interval.

The papers' models have 7B parameters and more and ran on GPUs; ours run on two CPU cores. {REAL} is
SmolLM2-135M-Instruct, 30 layers, with drafters trained here for minutes. The small models are the embedded 4M model;
models inflated from it, which have the cost of their size and the small one's text; a T5 pair for translation, which is
BiLD's own case; and, in files whose names end in "deeper", a trained one of 16 layers and 20M parameters
(docs/developer/training_experiments.md). Ratios of acceptance lengths do not depend on the machine, those of speed do.
Runs at b7ce0d6bd413 shared the machine with other work: their ways took turns, and the minutes are of a busy machine.
"""
LEFT_OUT = "Left out, as our experiments do not measure what the claim says:"


@dataclass(frozen=True, slots=True)
class PaperClaim:
    """A claim of `claims.toml`; see its head."""

    source: str
    text: str
    theirs: str
    least: float = 1.0
    why: str = ""
    note: str = ""
    left_out: str = ""

    def verdict(self, low: float | None, high: float | None) -> str:
        """Return what an interval says of it."""
        if low is None or high is None:
            return TOO_FEW
        return CONFIRMED if low > self.least else OPPOSITE if high < self.least else UNDECIDED

    def reason(self, verdict: str) -> str:
        """Return why the opposite came out, or what to know of a claim that is confirmed."""
        return {CONFIRMED: self.note, OPPOSITE: self.why}.get(verdict, "")

    def judged(self, row: dict[str, Any]) -> dict[str, str]:
        """Return the ratio of a row of `CLAIMED` with its interval, and the verdict."""
        held = (row.get("units") or FEWEST) >= FEWEST
        low, high = (row.get("times_low"), row.get("times_high")) if held else (None, None)
        # A curve none of whose points is as fast as the other's has no ratio.
        here = "nowhere" if row["times"] is None else f"{row['times']:.2f}"
        here += f" [{low:.2f}, {high:.2f}]" if low is not None else ""
        here += f" (at least {self.least:g})" if self.least != 1 else ""
        return {"here": here, "verdict": self.verdict(low, high)}


@cache
def paper_claims() -> dict[str, PaperClaim]:
    """Return all claims by their names."""
    held = tomllib.loads((HERE / "claims.toml").read_text(encoding="utf-8"))
    return {name: PaperClaim(**facts) for name, facts in held.items()}


def in_words(rows: list[dict[str, Any]]) -> Table:
    """Return the rows of `CLAIMED` for a report: each claim in words, the paper's ratio, and ours beside it."""
    found = []
    for row in rows:
        claim = paper_claims()[row["claim"]]
        judged = claim.judged(row) if not claim.left_out else {"here": claim.judged(row)["here"], "verdict": "left out"}
        found.append({"claim": f"{claim.source}: {claim.text}", "theirs": claim.theirs} | judged | {"of": _what(row)})
    return Table(CLAIMED, found, ("claim", "theirs", "here", "verdict", "of"))


def _what(row: dict[str, Any]) -> str:
    return f"{row['above']} over {row['below']}, {row['of']}"


def page(folder: Path) -> str:
    """Return the text of claims.md, from the result files in `folder`; raise a ValueError for an unknown claim."""
    found: dict[str, list[tuple[str, dict[str, Any], dict[str, Any]]]] = {name: [] for name in paper_claims()}
    for path in sorted(folder.glob("*.json")):
        facts = json.loads(path.read_text(encoding="utf-8"))
        for row in facts["tables"].get(CLAIMED, ()):
            if row["claim"] not in found:
                raise ValueError(f"{path.name} measures {row['claim']!r}, which claims.toml does not have.")
            found[row["claim"]].append((path.name, facts["about"], row))
    short, lines, files = [], [], dict[str, dict[str, Any]]()
    counts = {column: dict.fromkeys(VERDICTS, 0) for column in (REAL, OTHERS)}
    listed = {name: claim for name, claim in paper_claims().items() if not claim.left_out}
    for name, claim in listed.items():
        facts, cells = {"source": claim.source, "claim": claim.text}, dict[str, list[str]]()
        for file, about, row in sorted(found[name], key=_rank):
            judged, column = claim.judged(row), REAL if _is_real(about) else OTHERS
            counts[column][judged["verdict"]] += 1
            cells.setdefault(column, []).append(" ".join(judged.values()))
            files[file] = about
            said = {"reason or note": claim.reason(judged["verdict"]), "what": _what(row), "in": file}
            lines.append(facts | {"model": about["model"]} | judged | said | {"commit": about["commit"]})
        short.append(facts | {"theirs": claim.theirs} | {name: "; ".join(own) for name, own in cells.items()})
    counted = [
        f"{column}: {', '.join(f'{number} {verdict}' for verdict, number in own.items())}."
        for column, own in counts.items()
    ]
    unmeasured = sum(not found[name] for name in listed)
    left = [f"- {claim.source}: {claim.text} {claim.left_out}" for claim in paper_claims().values() if claim.left_out]
    made = [
        f"- `{file}`: `{about['command']}` at {about['commit']}; {about['model']}, {about['device']}, "
        f"{about['threads']} threads, {about['dtype']}{_minutes(about)}."
        for file, about in files.items()
    ]
    columns = ("source", "claim", "model", "here", "verdict", "reason or note", "what", "in", "commit")
    blocks = [HEAD, *counted, f"{unmeasured} claims not measured.", ""]
    blocks += [*markdown(Table("", short, ("source", "claim", "theirs", REAL, OTHERS))), "", "## Every measurement", ""]
    blocks += [*markdown(Table("", lines, columns)), "", LEFT_OUT, "", *left, "", "Measured by:"]
    return "\n".join([*blocks, "", *made, ""])


def _is_real(about: dict[str, Any]) -> bool:
    return str(about["model"]).startswith(REAL)


def _rank(measured: tuple[str, dict[str, Any], dict[str, Any]]) -> tuple[bool, bool, str]:
    """Put the real model first, then the models that a paper's own case has."""
    file, about, _ = measured
    return not _is_real(about), not str(about["model"]).startswith(PAIR), file


def _minutes(about: dict[str, Any]) -> str:
    """Return how long a run took."""
    ends = [about.get(name) for name in ("started", "finished")]
    if not all(ends):
        return ""
    begin, end = (datetime.fromisoformat(str(one)) for one in ends)
    return f", {max((end - begin).total_seconds() / 60, 1):.0f} minutes"
