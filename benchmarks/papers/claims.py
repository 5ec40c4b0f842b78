"""The table of claims: what the papers say of one way over another, and what was measured here.

`make results` writes claims.md from `claims.toml` and the kept result files that hold a table of comparisons. The
interval alone decides the verdict.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.harness.comparisons import CLAIMED
from benchmarks.harness.tables import markdown
from draftree.bench.report import Table

HERE = Path(__file__).parent
PAGE = HERE / "claims.md"
ENOUGH = 7  # prompts or batches; an interval that is drawn from fewer of them is too narrow
CONFIRMED, UNDECIDED, OPPOSITE, TOO_FEW = "confirmed", "undecided", "opposite here", "too few"
VERDICTS = (CONFIRMED, UNDECIDED, OPPOSITE, TOO_FEW)
HEAD = """# What the papers claim, measured here

Made by `make results` from `claims.toml` and the files in `benchmarks/results/`. What the five papers say of one way
of decoding, or one setting, over another, where it does not depend on hardware alone: a ratio of the two with its 95 %
bootstrap interval over prompts, or over batches of them, where there are seven or more. Left out is what they say of
one text or model over another: code gains more, and so do larger models.
*Confirmed*: the whole interval is above 1 (or what the line names); *opposite here*: all of it is below, with the
reason where one was measured; *undecided*: it holds 1; *too few*: under seven prompts or batches, which leave no
interval. The papers' models have 7B parameters and more and ran on GPUs; ours run on two CPU cores. They are the
embedded 4M model; models inflated from it, which have the cost of their size and the small one's text; and, in files
whose names end in "deeper", one of 16 layers and 20M parameters that was trained on, whose drafters have had 300 steps
of training
(docs/developer/training_experiments.md). Ratios of acceptance lengths do not depend on the machine, those of speed do.
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


@cache
def paper_claims() -> dict[str, PaperClaim]:
    """Return all claims by their names."""
    held = tomllib.loads((HERE / "claims.toml").read_text(encoding="utf-8"))
    return {name: PaperClaim(**facts) for name, facts in held.items()}


def page(folder: Path) -> str:
    """Return the text of claims.md, from the result files in `folder`; raise a ValueError for an unknown claim."""
    found: dict[str, list[tuple[str, dict[str, Any], dict[str, Any]]]] = {name: [] for name in paper_claims()}
    for path in sorted(folder.glob("*.json")):
        facts = json.loads(path.read_text(encoding="utf-8"))
        for row in facts["tables"].get(CLAIMED, ()):
            if row["claim"] not in found:
                raise ValueError(f"{path.name} measures {row['claim']!r}, which claims.toml does not have.")
            found[row["claim"]].append((path.name, facts["about"], row))
    lines, files = [], dict[str, dict[str, Any]]()
    listed = {name: claim for name, claim in paper_claims().items() if not claim.left_out}
    for name, claim in listed.items():
        facts = {"source": claim.source, "claim": claim.text, "theirs": claim.theirs}
        if not found[name]:
            lines.append(facts | {"here": "not measured"})
        for file, about, row in found[name]:
            files[file] = about
            held = (row.get("units") or ENOUGH) >= ENOUGH
            low, high = (row.get("times_low"), row.get("times_high")) if held else (None, None)
            verdict = claim.verdict(low, high)
            # A curve none of whose points is as fast as the other's has no ratio.
            here = "nowhere" if row["times"] is None else f"{row['times']:.2f}"
            here += f" [{low:.2f}, {high:.2f}]" if low is not None else ""
            here += f" (at least {claim.least:g})" if claim.least != 1 else ""
            of = f"{row['above']} over {row['below']}, {row['of']}"
            facts |= {"here": here, "verdict": verdict, "reason or note": claim.reason(verdict)}
            lines.append(facts | {"what": of, "in": file, "commit": about["commit"]})
    columns = ("source", "claim", "theirs", "here", "verdict", "reason or note", "what", "in", "commit")
    counts = {verdict: sum(line.get("verdict") == verdict for line in lines) for verdict in VERDICTS}
    said = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
    unmeasured = sum("verdict" not in line for line in lines)
    left = [f"- {claim.source}: {claim.text} {claim.left_out}" for claim in paper_claims().values() if claim.left_out]
    made = [
        f"- `{file}`: `{about['command']}` at {about['commit']}; {about['model']}, {about['device']}, "
        f"{about['threads']} threads, {about['dtype']}."
        for file, about in files.items()
    ]
    table = markdown(Table("", lines, columns))
    blocks = [HEAD, f"{said}, {unmeasured} not measured.", "", *table, "", LEFT_OUT, "", *left, "", "Measured by:"]
    return "\n".join([*blocks, "", *made, ""])
