"""What people see of a case: a verdict, its table, of a warm trie its figures set by set, remarks and a picture."""

from __future__ import annotations

from draftree.bench.case import COLUMNS, Result
from draftree.bench.names import WARM, label_of
from draftree.bench.pictures import case_picture
from draftree.bench.report import Report, Table
from draftree.bench.summary import count_disturbed
from draftree.bench.verdict import verdict
from draftree.engine.stats import STAGES

SHOWN_DIFFERENCES = 5  # of a method; the JSON file has all
LONGEST_REASON = 90  # characters; the JSON file has the rest
MOST_DISTURBED = 0.02  # share of answers that may be slow before a report warns
CAPTION = (
    "Total tokens / total time [95 % bootstrap over prompts]. Over plain is what drafting gains over draftree's plain "
    "decoding; over HF generate holds the gain of draftree's loop as well. Acceptance length: 1 + accepted / steps. "
    "Overhead efficiency: speed over plain / acceptance length. Differing: prompts whose ids are not those of the "
    "reference."
)


def case_report(name: str, result: Result) -> Report:
    """The report of a case, for files called `name`."""
    tables = [case_table(result), *set_table(result)]
    return Report(
        name,
        "Whole answers, by method",
        result.about,
        tables,
        remarks(result),
        result.facts(),
        lambda figure: case_picture(figure, result),
        [verdict(result)],
    )


def case_table(result: Result) -> Table:
    """A line for each method."""
    about = result.about
    where = f"{about['model']}, {about['dtype']}, {about['threads']} threads of {about['device']}; {about['case']}"
    return Table(where, result.entries(), COLUMNS, CAPTION)


def set_table(result: Result) -> list[Table]:
    """Figures of the warm trie by set; none where it was not measured, or prompts of all sets were mixed in batches."""
    if WARM not in result.rows or not result.rows[WARM].by_set:
        return []
    rows = [{"set": name} | row.figures(result.baselines.plain) for name, row in result.rows[WARM].by_set.items()]
    return [Table(f"{label_of(WARM)}, by set", rows, ("set", "tokens", *COLUMNS[1:-1]))]


def stage_table(result: Result) -> Table:
    """Microseconds a token by stage, of draftree's methods."""
    rows = [
        {"method": label_of(name)} | {stage: 1e6 * row.stats.seconds[stage] / row.tokens for stage in STAGES}
        for name, row in result.rows.items()
        if row.stats is not None
    ]
    return Table("Microseconds a token by stage", rows, ("method", *STAGES))


def remarks(result: Result) -> list[str]:
    """Lines below the table: what was answered, disturbances, why methods are missing, where answers differ."""
    lines = [_answered(result)]
    slow, compared = count_disturbed(result.samples)
    if slow > compared * MOST_DISTURBED:  # more than a quiet machine explains
        lines.append(
            f"The machine was not quiet: {slow} of {compared} answers took over twice the time of the same answer in "
            "another round. Measure again before you trust these figures."
        )
    for name in filter(result.unmeasured.__contains__, result.names):
        why = result.unmeasured[name]
        why = why if len(why) <= LONGEST_REASON else f"{why[: LONGEST_REASON - 1]}…"
        lines.append(f"{label_of(name)} was not measured: {why.rstrip('.')}.")
    lines += [f"{label_of(name)}: {note}." for name, note in result.notes.items()]
    for name, row in result.rows.items():
        for task, where in row.differing[:SHOWN_DIFFERENCES]:
            lines.append(f"{label_of(name)}, prompt {task.prompt.id}: {where}")
        if len(row.differing) > SHOWN_DIFFERENCES:
            lines.append(f"{label_of(name)}: {len(row.differing) - SHOWN_DIFFERENCES} more differ, see the JSON file.")
    return lines


def _answered(result: Result) -> str:
    about, settings = result.about, result.about["settings"]
    rounds = settings.get("rounds", 1)
    warmed = f", trie warmed with {about['warm_prompts']} answers" if about["warm_prompts"] else ""
    differ = sum(len(row.differing) for row in result.rows.values())
    return (
        f"{about['case'].capitalize()}; {about['prompts']} prompts of {len(about['sets'])} sets, up to "
        f"{settings['max_new_tokens']} new tokens, {rounds} {'round' if rounds == 1 else 'rounds'}{warmed}. Answers "
        f"that differ from those of {label_of(result.baselines.reference)}: {differ}."
    )
