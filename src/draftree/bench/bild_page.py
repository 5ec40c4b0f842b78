"""The report of `draftree bench bild` as one HTML file: picture, table, and examples with coloured tokens.

After figure 10 of BiLD: what of a text the large model said, and what the small one was let through with. Nothing is
fetched, and no script runs.
"""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path
from typing import Any

from draftree.bench.bild import BildResult, Point, label
from draftree.bench.bild_ways import PLAIN, SMALL
from draftree.bench.compare_page import whole_page
from draftree.trace.labels import pieces

OWN = """
mark { background: none; color: var(--c4); font-weight: 600; }
.said { border-collapse: separate; } .said td { text-align: left; white-space: normal; vertical-align: top; }
.said td:first-child { white-space: nowrap; color: var(--soft); width: 1%; }
img { max-width: 100%; height: auto; background: #fff; border-radius: 8px; }
"""
COLUMNS = ("way", "{}", "ms an answer", "times plain", "times HF generate", "calls a token", "engaged", "rolled back")


def write_html(result: BildResult, tokenizer: Any, folder: Path, picture: Path | None) -> Path:
    """Write bench-bild.html into `folder`; returns its path.

    Args:
        result: what was measured.
        tokenizer: of the models.
        folder: where to.
        picture: a PNG to show; None for none.
    """
    about = result.about
    best = {id(point) for point in result.best.values() if point is not None}
    parts = [
        "<h1>BiLD: quality against latency</h1>",
        f"<p class='soft'><code>{escape(about['command'])}</code><br>commit {escape(about['commit'] or 'unknown')}, "
        f"{about['threads']} threads of {escape(about['device'])}, {escape(about['started'])} to "
        f"{escape(about['finished'])}</p>",
        f"<p>{escape(about['metric'])} over {about['rows']} rows against {escape(about['against'])}; times over "
        f"{about['prompts']} rows, every way answering a row before the next one comes. Bold: the fastest points of "
        "the grid that lose nothing (0.1) or a point. BiLD changes texts; the lossless ways do not.</p>",
    ]
    if picture is not None:
        data = base64.b64encode(picture.read_bytes()).decode()
        parts.append(
            f"<p style='max-width:none'><img alt='Quality against latency' src='data:image/png;base64,{data}'></p>"
        )
    head = "".join(f"<th>{escape(name.format(about['metric']))}</th>" for name in COLUMNS)
    body = "".join(_row(point, id(point) in best) for point in result.points.values() if point.seconds is not None)
    parts.append(f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>")
    parts.append(
        f"<h2>Examples</h2><p>BiLD is {escape(about['shown'])}. <mark>Coloured</mark> tokens are the large model's, "
        "all others the small one's.</p>"
    )
    parts += [_example(result, tokenizer, i) for i in range(len(result.sources))]
    path = folder / "bench-bild.html"
    path.write_text(whole_page("draftree bench bild", parts, OWN), encoding="utf-8")
    return path


def _row(point: Point, best: bool) -> str:
    stats = point.stats if point.stats is not None and point.stats.drafted else None
    cells = [
        label(point.way),
        "" if point.quality is None else f"{point.quality:.2f}",
        f"{1000 * (point.seconds or 0):.0f}",
        f"{point.speed.value:.2f}" if point.speed else "",
        f"{point.over_theirs.value:.2f}" if point.over_theirs else "",
        f"{stats.calls_per_token:.2f}" if stats else "",
        f"{stats.engagement:.0%}" if stats else "",
        f"{stats.rollback_ratio:.0%}" if stats else "",
    ]
    mark = " class='best'" if best else ""
    return f"<tr{mark}>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def _example(result: BildResult, tokenizer: Any, number: int) -> str:
    row = result.rows[number]
    lines = [("input", escape(row.turns[0]))]
    if row.reference is not None:
        lines.append(("reference", escape(row.reference)))
    lines.append(("large model", escape(result.texts[PLAIN][number])))
    for point in result.points.values():
        if point.way.group == SMALL:
            lines.append((f"small model, {point.way.pair}", escape(result.texts[point.way.name][number])))
    said = result.sources[number]
    shown = [
        f"<mark>{escape(piece)}</mark>" if large else escape(piece)
        for piece, (_, large) in zip(pieces(tokenizer, [token for token, _ in said]), said, strict=True)
    ]
    lines.append(("BiLD", "".join(shown)))
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{text}</td></tr>" for name, text in lines)
    return f"<div class='wide' style='margin:12px 0'><table class='said'><tbody>{cells}</tbody></table></div>"
