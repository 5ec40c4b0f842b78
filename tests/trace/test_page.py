"""The page of a trace: whole in itself, safe with any text, no errors in a browser, its counts those of the run."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from devtools import browsing, look_at, needs_chromium

import draftree
from draftree.engine import Recorder, generate
from draftree.models import encode_prompt
from draftree.shaping import Fixed
from draftree.trace.file import Trace, read_trace, request_name, write_trace, write_trace_page

HOSTILE = 'Say </script><script>alert(1)</script> & "it\'s" <!-- {{data}} \\u003c\n\u2028 naïve 中文 🙂 \x00\x1b[31m'
PROMPTS = ["Describe the restaurant: name[Aromi], food[French], area[riverside]", HOSTILE]


@pytest.fixture(scope="module")
def recorded(demo: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Path, Any]:
    """A batch of merged drafters with pruning: its trace, its page, what `generate` returned."""
    folder = tmp_path_factory.mktemp("page")
    rows = [encode_prompt(demo.tokenizer, text) for text in PROMPTS]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    recorder = Recorder()
    drafter = draftree.Merge([draftree.Lookahead(), draftree.demo_drafter("medusa", demo.model)])
    pruner = draftree.EarlyPruning(draftree.demo_early_head(demo.model), top_k=8, always=True)
    options = {"drafter": drafter, "pruner": pruner, "shape": Fixed(16), "max_new_tokens": 32}
    out = generate(demo.model, ids, mask, recorder=recorder, **options)
    trace = read_trace(write_trace(recorder, folder / "run.jsonl", demo.tokenizer))
    return trace, write_trace_page(trace, folder / "run.html", "a </title><b> & run"), out


def test_the_page_is_whole_in_itself_and_holds_any_text_as_data(recorded):
    trace, path, _ = recorded
    page = path.read_text(encoding="utf-8")
    assert page.count("<script") == page.count("</script>") == 2
    assert "a &lt;/title&gt;&lt;b&gt; &amp; run</title>" in page
    assert "alert(1)</script>" not in page
    assert set(re.findall(r"https?://[^\s\"')]+", page)) == {"http://www.w3.org/2000/svg"}, "nothing is fetched"
    assert "default-src 'none'" in page
    assert "{{" not in page.replace("{{data}}", ""), "all places are filled"
    data = json.loads(re.search(r'<script type="application/json" id="trace">(.*?)</script>', page, re.S)[1])
    assert data["steps"] == trace.steps
    told = list(data["requests"].values())
    assert HOSTILE.split("\x00")[0] in told[1]["prompt_text"]
    assert [r["pieces"] for r in told] == [r["pieces"] for r in trace.requests.values()]


def with_script(page: Path, name: str, script: str) -> Path:
    """A copy of the page that does something when it is loaded."""
    copy = page.with_name(f"{name}.html")
    whole = page.read_text(encoding="utf-8")
    copy.write_text(whole.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    return copy


@needs_chromium
@pytest.mark.parametrize("width", [1280, 400])
def test_a_click_on_a_token_shows_its_steps_tree(recorded, tmp_path, width):
    trace, page, _ = recorded
    request = next(iter(trace.requests))
    parts = [member for _, member in trace.of(request)]
    number = next(
        i for i, member in enumerate(parts) if member["pruned"] and any(g is not None for g in member["accepted"])
    )
    token = sum(len(member["emitted"]) for member in parts[:number])
    script = (
        f"document.querySelector('[data-token=\"{token}\"]').click();"
        "const box = document.querySelector('#tree svg').getBoundingClientRect();"
        "document.body.dataset.tree = [box.width > 50, box.height > 20];"
        "document.body.dataset.fits = document.documentElement.scrollWidth <= innerWidth;"
    )
    look = look_at(with_script(page, f"click-{width}", script), tmp_path, width)
    assert look.console == []
    assert 'data-tree="true,true"' in look.dom
    assert 'data-fits="true"' in look.dom, "the page is no wider than the window"
    assert f"Step {number + 1} of {len(parts)}<" in look.dom
    tree = look.dom[look.dom.index('id="tree"') : look.dom.index('id="emitted"')]
    member = parts[number]
    accepted = sum(node is not None for node in member["accepted"])
    states = {state: tree.count(f'class="node {state}"') for state in ("root", "accepted", "pruned", "refused", "own")}
    assert states == {
        "root": 1,
        "accepted": accepted,
        "pruned": len(member["pruned"]),
        "refused": len(member["tokens"]) - 1 - accepted - len(member["pruned"]),
        "own": int(member["accepted"][-1] is None),
    }
    assert tree.count("✓ ") == accepted, "told apart by more than colour"
    assert tree.count("✕ ") == len(member["pruned"])
    assert look.picture.stat().st_size > 10_000


@needs_chromium
def test_the_page_opens_at_the_best_step_below_a_headline(recorded, tmp_path):
    trace, page, out = recorded
    look = look_at(page, tmp_path)
    hits = [sum(node is not None for node in member["accepted"]) for _, member in trace.of(next(iter(trace.requests)))]
    stats = out.stats.requests[0]
    headline = (
        f"The answer's {stats.emitted} tokens took {stats.steps} passes of the model; {stats.accepted} of them were "
        f"draft tokens, up to {max(hits)} in one step."
    )
    assert f">{headline}<" in look.dom
    assert f"Step {hits.index(max(hits)) + 1} of {len(hits)}<" in look.dom


@needs_chromium
def test_counts_at_the_last_step_are_the_runs_own(recorded, tmp_path):
    _, page, out = recorded
    script = "document.querySelectorAll('#requests button')[1].click(); document.getElementById('last').click();"
    look = look_at(with_script(page, "last", script), tmp_path)
    assert look.console == []
    rows = dict(re.findall(r'<tr data-count="([^"]+)">(.*?)</tr>', look.dom, re.S))
    shown = {name: [float(v) for v in re.findall(r'data-value="([^"]+)"', row)] for name, row in rows.items()}
    second, total = out.stats.requests[1], out.stats.total
    for name in ("steps", "emitted", "drafted", "pruned", "accepted", "rollbacks", "acceptance_length"):
        assert shown[name] == [getattr(stats, name) for stats in (second, second, total)], name
    for depth, hits in enumerate(total.accepted_by_depth):
        own = second.accepted_by_depth[depth] if depth < len(second.accepted_by_depth) else 0
        assert shown[f"depth-{depth + 1}"] == [own, own, hits]
    for source, hits in total.accepted_by_source.items():
        own = second.accepted_by_source[source]
        assert shown[f"source-{source}"] == [own, own, hits]
    for stage, seconds in total.seconds.items():
        assert shown[f"seconds-{stage}"] == [second.seconds[stage], second.seconds[stage], seconds]
    assert "alert(1)" in look.dom, "the hostile prompt is there, as text"


@needs_chromium
@pytest.mark.parametrize(("width", "columns"), [(1280, 2), (800, 2), (400, 1)])
def test_counts_stand_in_two_columns_where_there_is_width(recorded, tmp_path, width, columns):
    _, page, _ = recorded
    script = (
        "const boxes = [...document.querySelectorAll('#counts .wide')].map((box) => box.getBoundingClientRect());"
        "document.body.dataset.columns = new Set(boxes.map((box) => box.left)).size;"
        "document.body.dataset.fits = document.documentElement.scrollWidth <= innerWidth;"
        "document.body.dataset.tabs = JSON.stringify([...document.querySelectorAll('#requests button')]"
        ".map((tab) => tab.textContent));"
    )
    look = look_at(with_script(page, f"counts-{width}", script), tmp_path, width)
    assert look.console == []
    assert f'data-columns="{columns}"' in look.dom
    assert 'data-fits="true"' in look.dom
    tabs = json.loads(unescape(re.search(r'data-tabs="([^"]*)"', look.dom)[1]))
    assert tabs == ["1: Describe the restaurant:…", "2: Say </script><script>ale…"]


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ("<s><|user|>\nList three fruits.\n<|assistant|>\n", "3: List three fruits."),
        (
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nA\n\nB<|im_end|>\n<|im_start|>assistant\n",
            "3: A B",
        ),
        ("<s>[INST] Write a shell command that lists all files. [/INST]", "3: Write a shell command th…"),
        ("<bos><start_of_turn>user\nHello<end_of_turn>\n<start_of_turn>model\n", "3: Hello"),
        ("once upon \x1b[31ma time", "3: once upon  [31ma time"),
        ("<s>", "3: an empty prompt"),
    ],
)
def test_a_request_is_named_by_the_beginning_of_its_prompt(prompt, name):
    assert request_name(3, prompt) == name


@needs_chromium
def test_tables_scroll_in_a_box_of_their_own_on_a_telephone(recorded, tmp_path):
    _, path, _ = recorded
    with browsing(tmp_path) as page:
        page.open(path.as_uri(), 400)
        page.get("document.querySelector('#counts td').textContent = 'long'.repeat(40)")
        assert page.get("document.documentElement.scrollWidth <= innerWidth && innerWidth === 400")
        wide, shown = page.get(
            "(({scrollWidth, clientWidth}) => [scrollWidth, clientWidth])(document.querySelector('.wide'))"
        )
        assert wide > shown
