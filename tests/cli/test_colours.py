"""One colour for a drafter on terminals, pages and pictures, which people who confuse red and green distinguish too."""

import json
import re
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from devtools import look_at, needs_chromium

from benchmarks.harness.kit import LABELS
from benchmarks.harness.plots import bars, lines, method_colour, points
from benchmarks.harness.report import swatch
from draftree.cli.screen import legend, source_style
from draftree.pages import COLOURS, OTHER, PLAIN, THEIRS, colour_of, drafter_of, fill
from draftree.registry import DRAFTERS

NAMES = {  # names that drafters are met by, and the drafter
    **{name: name for name in COLOURS},
    "lookahead/output": "lookahead",
    "lookahead-2": "lookahead",
    "lookahead-warm": "lookahead",
    "bild-lossless": "bild",
    "medusa+bita": "several",
    "mine": None,
    "constructor": None,
}
# What colours look like to people without one of the three receptors (Machado and others, 2009), in linear RGB.
DEUTERANOPIA = [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]
PROTANOPIA = [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour):
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    """CIE L*a*b*, where distances are about those that are seen."""
    x, y, z = np.cbrt(TO_XYZ @ np.clip(rgb, 0, 1) / [0.9505, 1, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("name", COLOURS)
def test_a_colour_can_be_read_on_white_and_on_black(name):
    luminance = float(linear(COLOURS[name]) @ TO_XYZ[1])
    assert 1.05 / (luminance + 0.05) >= 3
    assert (luminance + 0.05) / 0.05 >= 3


@pytest.mark.parametrize(
    ("sight", "least"), [(np.eye(3), 30), (np.array(DEUTERANOPIA), 13), (np.array(PROTANOPIA), 13)]
)
def test_any_two_colours_are_distinguished(sight, least):
    seen = {name: lab(sight @ linear(colour)) for name, colour in COLOURS.items()}
    for one, other in combinations(seen, 2):
        assert np.linalg.norm(seen[one] - seen[other]) > least, (one, other)


def test_every_drafter_of_the_package_has_a_colour():
    assert {drafter_of(name) for name in DRAFTERS if name != "none"} <= set(COLOURS)
    assert {name: drafter_of(name) for name in NAMES} == NAMES
    assert {method_colour(name) for name in LABELS} == {colour_of(n) for n in LABELS} - {OTHER} | {PLAIN, THEIRS}


def test_a_terminal_has_these_colours():
    for name in NAMES:
        assert source_style(name).removeprefix("bold ") == colour_of(name)
    assert source_style("medusa+bita").startswith("bold ")
    text = legend()
    named = {text.plain[span.start : span.end]: span.style.removeprefix("bold ") for span in text.spans}
    assert {name: named[name] for name in COLOURS} == COLOURS
    assert legend(["lookahead/output", "medusa"]).plain.endswith("by drafter: lookahead/output, medusa.")
    assert legend([]).plain == "Colours: all tokens are the model's own; no draft token was accepted."


@needs_chromium
@pytest.mark.parametrize("package", ["draftree.trace", "draftree.serve"])
def test_pages_have_these_colours(package, tmp_path):
    places = {"title": "t", "data": '{"requests": {}, "steps": [], "runs": {}, "tokens": {}}'}
    script = (
        f"<script>document.body.dataset.found = JSON.stringify({json.dumps(list(NAMES))}.map((name) =>"
        "Draw.mark(document.createElement('i'), name).style.textDecorationColor))</script></body>"
    )
    page = tmp_path / "page.html"
    page.write_text(fill(package, **(places if package == "draftree.trace" else {})).replace("</body>", script))
    found = re.search(r'data-found="([^"]*)"', look_at(page, tmp_path).dom)
    shown = re.findall(r"rgb\((\d+), (\d+), (\d+)\)", found[1])
    colours = ["#" + "".join(f"{int(part):02x}" for part in parts) for parts in shown]
    assert dict(zip(NAMES, colours, strict=True)) == {name: colour_of(name) for name in NAMES}


def test_pictures_and_report_pages_have_these_colours():
    hexed = pytest.importorskip("matplotlib.colors").to_hex
    new = pytest.importorskip("matplotlib.figure").Figure
    drafted = [name for name, drafter in NAMES.items() if drafter]
    table = pd.DataFrame({"drafter": [*drafted, "none"], "nodes": 4, "x": 1.0})
    expected = [colour_of(name) for name in drafted]
    drawn = {plot: new() for plot in (bars, points, lines)}
    bars("x", label="drafter")(drawn[bars], table)
    points("x", label="drafter")(drawn[points], table)
    lines("nodes", "x", by="drafter")(drawn[lines], table)
    assert [hexed(bar.get_facecolor()) for bar in drawn[bars].axes[0].patches] == [*expected, PLAIN]
    marks = [line for line in drawn[points].axes[0].lines if line.get_marker() == "o"]
    assert [hexed(mark.get_color()) for mark in marks] == [*expected, PLAIN]
    shown = {c.get_label(): hexed(c.lines[0].get_color()) for c in drawn[lines].axes[0].containers}
    single = [name for name in drafted if drafter_of(name) != "several"]
    assert {name: shown[name] for name in single} == {name: colour_of(name) for name in single}
    assert {name: method_colour(name) for name in single} == {name: colour_of(name) for name in single}
    assert [swatch("drafter", name) for name in drafted] == expected
    assert swatch("drafter", "none") is swatch("nodes", "medusa") is None
