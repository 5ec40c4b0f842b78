"""The report of a comparison as one HTML file: tables and pictures, nothing fetched, no script.

It is read on screens of any width: pictures stand in a grid that folds to one column, tables scroll by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from draftree.bench import svg
from draftree.bench.compare import Comparison, Measured
from draftree.bench.compare_case import Result
from draftree.bench.compare_files import differing, interval, remarks
from draftree.bench.compare_methods import HUGGING_FACE, REFERENCE, WARM, label_of
from draftree.bench.compare_plane import LETTERS, Point, points_of
from draftree.engine.stats import STAGES

HEADS = (
    "method", "tokens/s", "over HF generate", "over plain", "acceptance length", "overhead efficiency", "differing",
)  # fmt: skip
MOST_SERIES = 5  # methods in pictures with a colour for each
STYLE = """
:root { --ink: #1d2733; --soft: #5b6875; --rule: #e2e7ec; --ground: #f5f7f9; --card: #fff;
  --c0: #2f7d32; --c1: #3b6fb6; --c2: #d9822b; --c3: #8e4ea8; --c4: #c23b5a; --c5: #8795a3; --c6: #0f8b8d;
  --c7: #9aa832; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4eaf0; --soft: #9fb0bf; --rule: #2f3a45; --ground: #12181e;
  --card: #1a222a; --c0: #6cbf70; --c1: #7aa9e6; --c2: #f0a860; --c3: #c893dd; --c4: #ef7f97; --c5: #75828f;
  --c6: #4fc3c5; --c7: #c9d55f; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1320px; margin: 0 auto; padding: 20px 16px 48px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 20px; margin: 36px 0 4px; }
h3 { font-size: 16px; margin: 26px 0 6px; } h4 { font-size: 14px; margin: 0 0 2px; }
p { margin: 4px 0 10px; max-width: 75ch; } .soft, .card p { color: var(--soft); font-size: 13px; }
code { overflow-wrap: anywhere; }
.grid { display: grid; gap: 14px; margin: 12px 0;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 370px), 1fr)); }
.two { grid-template-columns: repeat(auto-fit, minmax(min(100%, 450px), 1fr)); }
.card svg { max-width: 560px; margin: 0 auto; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 12px; min-width: 0; }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--rule); border-radius: 8px; }
table { border-collapse: collapse; font-size: 13px; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 10px; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; } tr:last-child td { border-bottom: 0; }
th:first-child, td:first-child, .why { text-align: left; } td small { color: var(--soft); }
@media (max-width: 600px) { td, th { padding: 4px 6px; } td:first-child { white-space: normal; min-width: 9em; } }
tr.best td { font-weight: 600; } ul { padding-left: 20px; font-size: 13px; }
svg { display: block; width: 100%; height: auto; font: 12px system-ui, sans-serif; fill: var(--ink); }
svg .axis { fill: var(--soft); font-size: 11px; } svg .value { font-size: 11px; }
svg .line { stroke: var(--rule); fill: none; }
svg .iso { stroke: var(--soft); fill: none; stroke-dasharray: 2 4; opacity: .7; }
svg .mark { stroke: var(--soft); fill: none; stroke-width: 1.5; }
svg .whisker { stroke: var(--ink); stroke-width: 1.2; }
svg .curve { fill: none; stroke-width: 2; }
""" + "".join(f"svg .c{i} {{ fill: var(--c{i}); }} svg .s{i} {{ stroke: var(--c{i}); }}\n" for i in range(svg.COLOURS))


def write_html(found: Comparison, folder: Path) -> Path:
    """Write bench-compare.html into `folder`; returns its path."""
    about = found.about
    body = [
        "<h1>Comparison of decoding methods</h1>",
        f"<p class='soft'><code>{escape(about['command'])}</code><br>commit {escape(about['commit'] or 'unknown')}, "
        f"{about['threads']} threads of {escape(about['device'])}, {escape(about['started'])} to "
        f"{escape(about['finished'])}" + (f", went on after a stop at group {found.resumed}" if found.resumed else "")
        + "</p>",
        "<p>Total tokens over total time; in brackets 95 % bootstrap intervals over prompts. Every prompt is answered "
        "by every method before the next one comes. Acceptance length is 1 + accepted / steps, overhead efficiency the "
        "speed over plain decoding divided by it.</p>",
    ]  # fmt: skip
    for measured in found.models:
        body += _model(measured)
    path = folder / "bench-compare.html"
    path.write_text(whole_page("draftree bench compare", body), encoding="utf-8")
    return path


def whole_page(title: str, parts: Sequence[str], style: str = "") -> str:
    """A page of `parts` (HTML) with these tables' and pictures' style sheet, and `style` behind it."""
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'><link rel='icon' href='data:,'>"
        f"<title>{escape(title)}</title><style>{STYLE}{style}</style></head>\n<body><main>\n"
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


def _model(measured: Measured) -> list[str]:
    first = measured.cases[0].about
    parts = [
        f"<h2>{escape(measured.model)}</h2>",
        f"<p class='soft'>{escape(first['dtype'])}, up to {first['settings']['max_new_tokens']} new tokens, trie "
        f"warmed with {first['warm_prompts']} answers.</p>",
    ]
    cards = []
    if measured.plane is not None:
        cards.append(_plane_card(measured.plane))
    if measured.costs:
        cards.append(_cost_card(measured.costs))
    for i, result in enumerate(measured.cases):
        parts += _case(result)
        if i == 0 and cards:  # of the model, beside its first case
            parts += [
                "<h3>Trees: what they bring and what they cost</h3>",
                f"<div class='grid two'>{''.join(cards)}</div>",
            ]
            if measured.plane is not None:
                parts.append(_plane_table(points_of(measured.plane)))
    return parts


def _case(result: Result) -> list[str]:
    about = result.about
    cards = [_speed_card(result), _stage_card(result), _depth_card(result)]
    if any(row.by_set for row in result.rows.values()):
        cards.insert(1, _task_card(result))
    grid = "grid two" if len(cards) == 4 else "grid"
    return [
        f"<h3>{escape(about['case'])}</h3>",
        f"<p class='soft'>{about['prompts']} prompts of {len(about['sets'])} sets, {about['settings']['rounds']} "
        f"{'round' if about['settings']['rounds'] == 1 else 'rounds'}. {_quiet(result)}</p>",
        f"<div class='{grid}'>{''.join(cards)}</div>",
        _table(result),
        _remarks(result),
    ]


def _quiet(result: Result) -> str:
    slow, compared = result.disturbed
    if not compared:
        return ""
    return f"{slow} of {compared} answers took over twice the time of the same answer in another round."


def _table(result: Result) -> str:
    rows = []
    for name in result.names:
        label = escape(label_of(name)) + (" (plain)" if name == result.plain else "")
        if name not in result.rows:
            rows.append(f"<tr><td>{label}</td><td class='why' colspan='6'><small>not measured</small></td></tr>")
            continue
        row = result.rows[name]
        drafts = row.stats is not None and row.stats.drafted > 0
        efficiency = row.efficiency(result.plain)
        cells = [
            interval(row.speed, "{:.0f}"), interval(row.over.get(REFERENCE), "{:.2f}"),
            interval(row.over.get(result.plain), "{:.2f}"),
            f"{row.stats.acceptance_length:.2f}" if drafts and row.stats else "",
            f"{efficiency:.2f}" if drafts and efficiency is not None else "", differing(result, name),
        ]  # fmt: skip
        mark = " class='best'" if name == fastest(result) else ""
        rows.append(f"<tr{mark}><td>{label}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    head = "".join(f"<th>{name}</th>" for name in HEADS)
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"


def _remarks(result: Result) -> str:
    told = [f"{label_of(name)}: {note}." for name, note in remarks(result)]
    for name, row in result.rows.items():
        told += [f"{label_of(name)}, prompt {task.prompt.id}: {where}." for task, where in row.parted[:5]]
        if len(row.parted) > 5:
            told.append(f"{label_of(name)}: {len(row.parted) - 5} more differ, see the JSON file.")
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in told)}</ul>" if told else ""


def fastest(result: Result) -> str:
    """The method with most tokens a second."""
    return max(result.rows, key=lambda name: result.rows[name].speed.value)


def drafting(result: Result) -> list[str]:
    """Measured drafters, fastest first; the worst case, which accepts nothing, is none."""
    names = [n for n, row in result.rows.items() if row.stats is not None and row.stats.accepted]
    return sorted(names, key=lambda name: -result.rows[name].speed.value)


def _card(title: str, told: str, picture: str) -> str:
    return f"<div class='card'><h4>{escape(title)}</h4><p>{escape(told)}</p>{picture}</div>"


def _speed_card(result: Result) -> str:
    best = fastest(result)
    lines = []
    for name in result.names:
        if name in result.rows:
            speed = result.rows[name].speed
            colour = 5 if name in HUGGING_FACE else 0 if name == best else 1
            title = f"{label_of(name)}: {interval(speed, '{:.1f}')} tokens a second"
            lines.append(svg.Bar(label_of(name), speed.value, speed.low, speed.high, colour, title))
    return _card("Tokens a second", "Grey: Hugging Face; green: the fastest.", svg.bars(lines, unit="tokens/s"))


def _task_card(result: Result) -> str:
    names = drafting(result)[:MOST_SERIES]
    if WARM in result.rows and WARM not in names and names:
        names[-1] = WARM
    reference = REFERENCE if REFERENCE in result.rows else result.plain
    sets = list(result.about["sets"])
    series = [
        svg.Series(
            label_of(name),
            [(sets.index(s), row.over[reference].value) for s, row in result.rows[name].by_set.items()],
            colour,
        )
        for colour, name in enumerate(names)
    ]
    picture = svg.dots(sets, series, f"times {label_of(reference)}", 1.0)
    return _card("Speed-up by task", f"Over {label_of(reference)}; the line is its speed.", picture)


def _stage_card(result: Result) -> str:
    lines = []
    for name in result.names:
        row = result.rows.get(name)
        if row is not None and row.stats is not None and row.tokens:
            parts = [1000 * row.stats.seconds[stage] / row.tokens for stage in STAGES]
            parts.append(max(1000 * row.seconds / row.tokens - sum(parts), 0.0))
            lines.append((label_of(name), parts))
    names = (*STAGES, "between")
    told = "Milliseconds a token; prompts are read in verify, and between the stages drafters learn."
    return _card("Time by stage", told, svg.stacked(lines, names, "{:.2f}", "ms a token"))


def _depth_card(result: Result) -> str:
    series = []
    for colour, name in enumerate(drafting(result)[: svg.COLOURS]):
        stats = result.rows[name].stats
        if stats is not None and stats.steps:
            shares = [(depth + 1.0, hits / stats.steps) for depth, hits in enumerate(stats.accepted_by_depth)]
            series.append(svg.Series(label_of(name), shares, colour))
    told = (
        "Share of steps in which a guess of that depth was accepted; each curve's sum is its acceptance length less 1."
    )
    return _card("Acceptance by depth", told, svg.lines(series, "depth", "share of steps"))


def _cost_card(costs: dict[str, dict[str, list[float]]]) -> str:
    series = [
        svg.Series(f"{runner} runner", [(n, 1000 * s) for n, s in zip(c["rows"], c["seconds"], strict=True)], colour)
        for colour, (runner, c) in enumerate(costs.items())
    ]
    picture = svg.lines(series, "rows of a step", "milliseconds", x_log=True)
    return _card("Step time by rows", "The fastest of several steps behind 128 tokens of context.", picture)


def _plane_card(result: Result) -> str:
    points = points_of(result)
    kinds: list[tuple[str, list[Point]]] = [
        ("one drafter", [p for p in points if p.sources == 1]),
        ("a pair", [p for p in points if p.sources == 2]),
        ("all together", [p for p in points if p.sources > 2]),
    ]
    series = [svg.Series(kind, [(p.verify, p.length) for p in own], i) for i, (kind, own) in enumerate(kinds) if own]
    names = [[p.short if p.sources < 3 else "all" for p in own] for _, own in kinds if own]
    picture = svg.plane(series, names, "time to verify a step, plain steps", "tokens a step")
    used = [LETTERS.get(p.method, p.method) for p in kinds[0][1]]
    meaning = ", ".join(f"{letter} {label_of(p.method)}" for letter, p in zip(used, kinds[0][1], strict=True))
    told = (
        f"{meaning}. {result.about['settings']['fixed']} guesses in every step. Lines: speed over plain decoding if "
        "nothing but the pass took time."
    )
    return _card("Accepted length against time to verify", told, picture)


def _plane_table(points: Sequence[Point]) -> str:
    rows = "".join(
        f"<tr><td>{escape(label_of(p.method))}</td><td>{p.length:.2f}</td><td>{p.verify:.2f}</td>"
        f"<td>{p.length / p.verify:.2f}</td><td>{p.speed:.2f}</td></tr>"
        for p in sorted(points, key=lambda p: -p.speed)
    )
    head = "".join(f"<th>{name}</th>" for name in ("drafters", "tokens a step", "time", "by pass alone", "speed"))
    told = "By pass alone: tokens a step over time to verify. Speed: as measured, guessing included. Both over plain."
    table = f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    return f"{table}<p class='soft'>{escape(told)}</p>"
