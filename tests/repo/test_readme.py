"""The README and the first page of the docs hold what they promise: code runs, commands exist, links lead somewhere and
tables are those of the result files."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

import draftree
from benchmarks import report
from draftree.cli import app

ROOT = Path(__file__).parents[2]
FRONT = ["README.md", "docs/index.md"]
PAGES = sorted(str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
USER_PAGES = [page for page in PAGES if page.startswith("docs/") and page not in ("docs/results.md", "docs/cli.md")]
USER_PAGES = [page for page in USER_PAGES if not page.startswith("docs/developer/")]
RESULT = re.compile(r"<!-- results:([\w-]+) -->.*?<!-- /results:\1 -->", re.S)


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"^```{re.escape(kind)}\n(.*?)^```", read(page), re.M | re.S)


@pytest.mark.parametrize("page", FRONT)
def test_ten_lines_of_python(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(blocks(page, "python")[-1], names)
    said = capsys.readouterr().out
    assert "class Solution" in said
    assert "acceptance length" in said


def test_one_argument_inside_generate_changes_no_token(demo: Any) -> None:
    (inside,) = [block for block in blocks("README.md", "python") if "custom_generate=" in block]
    messages = [{"role": "user", "content": "Write a Python solution for the LeetCode problem two sum."}]
    template = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    inputs = demo.tokenizer.apply_chat_template(messages, **template)
    names: dict[str, Any] = {"model": demo.model, "inputs": inputs}
    exec(inside, names)
    plain = demo.model.generate(**inputs, max_new_tokens=128, do_sample=False)
    assert names["text"].tolist() == plain.tolist()
    assert plain.shape[1] > inputs["input_ids"].shape[1] + 20, "long enough to draft"


@pytest.mark.parametrize("page", PAGES)
def test_python_of_every_page_compiles(page: str) -> None:
    for block in blocks(page, "python"):
        compile(block, page, "exec")


def commands(page: str) -> list[tuple[str, bool]]:
    """Every line of a shell block, those of one command joined; and what sentences name of one, which is not whole."""
    lines = [line for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
    prose = re.sub(r"^```.*?^```", "", RESULT.sub("", read(page)), flags=re.M | re.S)
    named = re.findall(r"`((?:draftree|make) [a-z][^`]*)`", prose)
    return [(line, True) for line in lines if line.strip()] + [(line, False) for line in named]


@pytest.mark.parametrize("page", FRONT + [page for page in USER_PAGES if page not in FRONT])
def test_commands_exist_with_their_options(page: str) -> None:
    targets = re.findall(r"^([a-z0-9-]+):", read("Makefile"), re.M)
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    assert commands(page) or page not in FRONT
    for line, whole in commands(page):
        if not line.startswith(("draftree", ".venv/bin/draftree", "make ", "pip ")):
            continue  # what curl sends in these lines is sent in tests/serve/test_serve.py
        program, *words = shlex.split(line, comments=True)
        if program == "make":
            assert words[0] in targets, line
        elif program == "pip":
            assert all(set(several.split(",")) <= {*extras} for several in re.findall(r"\[([\w,]+)\]", line)), line
        else:
            command: Any = typer.main.get_command(app)
            while hasattr(command, "commands") and words:
                command = command.commands[words.pop(0)]
            if words:
                command.make_context(command.name, words, resilient_parsing=not whole)


def anchors(path: Path) -> set[str]:
    """As GitHub and MyST make them of headings."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    heads = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_resolve(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", read(page), flags=re.M | re.S)):
        if target.startswith(("http", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(path), f"{page}: {target}"


@pytest.mark.parametrize("page", [*FRONT, "docs/concepts.md"])
def test_float32_and_16_bits_are_explained_first(page: str) -> None:
    first = " ".join(read(page).partition("\n## ")[0].split())
    assert "In float32" in first
    assert "token for token" in first
    assert "In 16 bits two tokens that are nearly tied may change places" in first


def test_tables_are_those_of_the_result_files() -> None:
    others = [page.read_text(encoding="utf-8") for page in report.OTHERS]
    assert {match[1] for match in RESULT.finditer("".join(others))} == set(report.SHOWN["table"])
    assert list(map(report.tables, others, report.OTHERS)) == others, "make results"
    with pytest.raises(ValueError, match="needs a table"):
        report.tables("<!-- results:nothing --><!-- /results:nothing -->", report.PAGE)


def ahead(size: str) -> tuple[str, str]:
    """How far draftree's best way is ahead of the best peer's, plainly and of all ways, as the README prints it."""
    rows = report.read(report.RESULTS / f"peers-{size}.json")["rows"]
    ratios = []
    for counts in (lambda row: row["way"] == "plain", lambda row: True):
        speeds: dict[bool, float] = {}
        for row in filter(counts, rows):
            ours = row["engine"] == "draftree"
            speeds[ours] = max(speeds.get(ours, 0.0), row["tokens_a_second"])
        ratios.append(f"{speeds[True] / speeds[False]:.2f}")
    return ratios[0], ratios[1]


def test_how_far_we_are_ahead_is_what_was_measured() -> None:
    told = " ".join(read("README.md").split())
    plain, drafted = ahead("400m")
    assert f"At 400M parameters draftree is {plain} times as fast" in told
    assert f"without drafting, and {drafted} times as fast with drafting" in told
    assert "At 60M it is {} and {} times.".format(*ahead("60m")) in told
    table = read("docs/engines.md")
    for row, results in (
        ("400M | float32", "400m"),
        ("400M | float32, without AMX", "400m-vectors"),
        ("400M | bfloat16", "400m-bfloat16"),
        ("400M | bfloat16, with AMX", "400m-bfloat16-amx"),
        ("400M | 8-bit weights, bfloat16", "400m-int8-bfloat16"),
        ("400M | 8-bit weights, float32", "400m-int8"),
        ("60M | float32", "60m"),
        ("60M | float32, batches of four", "60m-batch-4"),
        ("60M | float32, batches of eight", "60m-batch-8"),
    ):
        assert f"| {row} | {' | '.join(ahead(results))} |" in table


def test_a_version_that_is_named_is_ours() -> None:
    for page in FRONT:
        for version in re.findall(r"draftree[ =]=?v?(\d+\.\d+\.\d+)", read(page)):
            assert version == draftree.__version__, page


def test_methods_stand_in_the_sidebar_as_on_their_page() -> None:
    listed = re.findall(r"^methods/(\w+)$", "\n".join(blocks("docs/index.md", "{toctree}")), re.M)
    order = [name.replace("_", "") for name in listed]
    told = [name.lower() for name in re.findall(r"^\| `(\w+)`", read("docs/methods/README.md"), re.M)]
    assert len(told) > 8
    assert [name for name in order if name in told] == [name for name in told if name in order]
    assert set(told) - set(order) == {"grammardrafter"}, "its page is structured_output"


def test_every_page_is_in_the_sidebar() -> None:
    listed = set(re.findall(r"^([\w/*]+)$", "\n".join(blocks("docs/index.md", "{toctree}")), re.M))
    for page in PAGES:
        name = page.removeprefix("docs/").removesuffix(".md")
        if page.startswith("docs/") and not name.startswith(("_", "index")):
            assert name in listed or f"{name.partition('/')[0]}/*" in listed, f"{page} is missing in docs/index.md"
