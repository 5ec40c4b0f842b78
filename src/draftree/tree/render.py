"""Trees for people: text for a terminal, a picture for a page.

The text shows each node with its path probability and its drafters, so a reader sees where a drafter was
sure. The picture gives each leaf a row of its own and each depth a column, so a chain is a straight
line and siblings stand under each other in the order of their probability.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from draftree.errors import install
from draftree.files import replacing

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from draftree.tree.token_tree import TokenTree

Decode = Callable[[int], str]
INK, GREY = "#111827", "#6b7280"
GAP, LINE = 0.34, 0.25  # inches between columns, and between lines
FAINTEST = 1e-3


def to_text(tree: TokenTree, b: int = 0, decode: Decode | None = None) -> str:
    """Tree b as indented text: token, path probability, sources; likeliest child first.

    decode: token id -> text (for example `tokenizer.decode`); ids are shown without it.
    """
    from rich.console import Console
    from rich.text import Text

    logp, sources = tree.logp[b].tolist(), tree.source[b].tolist()
    notes = [f"  {math.exp(p):.3f}  from {_names(bits)}" for p, bits in zip(logp, sources, strict=True)]
    drawn = to_rich(tree, b, decode, lambda node, label: Text(label + (notes[node] if node else "")))
    # Wide enough for the deepest indent, as rich would cut it at the terminal's edge.
    width = 4 * (tree.height + 1) + 60 + max(map(len, _labels(tree, b, decode)))
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(drawn)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def to_rich(tree: TokenTree, b: int, decode: Decode | None, say: Callable[[int, str], Text]) -> Tree:
    """Tree b for a rich console, likeliest child first.

    decode: token id -> text; ids are shown without it. say: a node and its label -> the line that stands for it.
    """
    from rich.tree import Tree

    labels, below = _labels(tree, b, decode), _children(tree, b)
    branches = {0: Tree(say(0, labels[0]))}
    order = [0]
    for node in order:
        for child in below[node]:
            branches[child] = branches[node].add(say(child, labels[child]))
            order.append(child)
    return branches[0]


def to_picture(tree: TokenTree, path: str | Path, b: int = 0, decode: Decode | None = None) -> None:
    """Tree b drawn to `path`, format by suffix (.png, .svg, .pdf); shade is the path probability.

    Labels are token ids, or the text that `decode` gives for them. ImportError without matplotlib.
    """
    try:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import LinearSegmentedColormap, LogNorm
        from matplotlib.figure import Figure
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path as Curve
    except ImportError as error:
        raise ImportError(f"Drawing a tree needs matplotlib: {install('bench')}.") from error

    size = tree.sizes[b]
    parents, depth = tree.parents[b].tolist(), tree.depth[b, :size].tolist()
    # Path probabilities fall by factors, so shades go by their logarithm, over three decades.
    chance = tree.logp[b].double().exp().clamp(FAINTEST, 1.0).tolist()
    labels = [label if len(label) <= 16 else label[:15] + "…" for label in _labels(tree, b, decode)]
    # All lengths are inches: each depth is a column as wide as its longest label.
    half = [0.0] * (max(depth) + 1)
    for node in range(size):
        half[depth[node]] = max(half[depth[node]], 0.06 + 0.031 * len(labels[node]))
    centre, edge = [], 0.12
    for h in half:
        centre.append(edge + h)
        edge += 2 * h + GAP
    rows = _rows(tree, b)
    line = [0.50 + LINE * row for row in rows]
    wide, tall = max(edge - GAP + 0.12, 2.6), max(line) + 0.22
    # A figure of its own leaves pyplot's global state, and the user's backend, alone.
    figure = Figure(figsize=(wide, tall), dpi=160, facecolor="white")
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(0.0, wide), ylim=(tall, 0.0))
    axes.axis("off")
    shades = LinearSegmentedColormap.from_list("draftree", ["#eef4fb", "#8fbbe8", "#1d4ed8", "#172554"])
    scale = LogNorm(FAINTEST, 1.0)
    for node in range(1, size):
        x0, y0 = centre[depth[node] - 1] + half[depth[node] - 1], line[parents[node]]
        x1, y1 = centre[depth[node]], line[node]
        middle, end = x0 + GAP / 2, x0 + GAP
        bend = Curve(
            [(x0 - half[depth[node] - 1], y0), (x0, y0), (middle, y0), (middle, y1), (end, y1), (x1, y1)],
            [Curve.MOVETO, Curve.LINETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4, Curve.LINETO],
        )
        weight = 0.6 + 1.8 * scale(chance[node])
        axes.add_patch(PathPatch(bend, fill=False, edgecolor="#cbd5e1", linewidth=weight, zorder=1))
    for node in range(size):
        shade = scale(chance[node])
        axes.text(
            centre[depth[node]],
            line[node],
            labels[node],
            ha="center",
            va="center",
            fontsize=7,
            family="monospace",
            color="white" if node == 0 or shade > 0.5 else INK,
            parse_math=False,
            bbox={
                "boxstyle": "round,pad=0.28,rounding_size=0.5",
                "facecolor": INK if node == 0 else shades(shade),
                "edgecolor": INK if node == 0 else "#7fa6d6",
                "linewidth": 0.5,
            },
            zorder=2,
        )
    for d, x in enumerate(centre):
        axes.text(x, 0.27, str(d) if d else "root", ha="center", va="center", fontsize=6, color=GREY)
    bar = figure.add_axes((1 - 1.12 / wide, 1 - 0.1 / tall, 1.0 / wide, 0.05 / tall))
    legend = figure.colorbar(ScalarMappable(scale, shades), cax=bar, orientation="horizontal", ticks=[])
    legend.outline.set_visible(False)
    key = f"path probability  ≤{FAINTEST:g} … 1"
    axes.text(wide - 1.18, 0.075, key, ha="right", va="center", fontsize=5, color=GREY)
    with replacing(path) as temporary:
        figure.savefig(temporary)


def _labels(tree: TokenTree, b: int, decode: Decode | None) -> list[str]:
    tokens = tree.tokens[b, : tree.sizes[b]].tolist()
    if decode is None:
        return [str(token) for token in tokens]
    # Visible spaces and line breaks, which are what tokens differ by most often.
    return [repr(decode(token))[1:-1].replace(" ", "␣") or "∅" for token in tokens]


def _children(tree: TokenTree, b: int) -> list[list[int]]:
    """Children of each node, likeliest first."""
    parents, logp = tree.parents[b, : tree.sizes[b]].tolist(), tree.logp[b].tolist()
    below: list[list[int]] = [[] for _ in parents]
    for node in sorted(range(1, len(parents)), key=lambda i: (-logp[i], i)):
        below[parents[node]].append(node)
    return below


def _rows(tree: TokenTree, b: int) -> list[float]:
    """A height for each node: leaves on lines of their own, a parent level with its likeliest child."""
    below = _children(tree, b)
    row, line = [0.0] * len(below), 0
    stack = [0]
    while stack:
        node = stack.pop()
        stack.extend(reversed(below[node]))
        if not below[node]:
            row[node] = line
            line += 1
    for node in range(len(below) - 1, -1, -1):
        if below[node]:
            row[node] = row[below[node][0]]
    return row


def _names(mask: int) -> str:
    return "+".join(str(bit) for bit in range(mask.bit_length()) if mask >> bit & 1) or "-"
