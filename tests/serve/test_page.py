"""The server's page: one file with a closed policy; in a browser it shows the API's outputs."""

from __future__ import annotations

import copy
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import needs_chromium
from devtools import Page, browsing
from serve_driver import Running, serving

ASKED = "Describe the restaurant: name[Aromi], food[French], area[riverside]"
HOSTILE = "</script><img src=x onerror=\"document.title='taken'\"> & 'quoted' \u2028 中文 🙂 `$(id)` \\n"
OVER = "document.getElementById('verdict').textContent || !document.getElementById('error').hidden"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browsing(tmp_path_factory.mktemp("browser")) as found:
        yield found


def opened(page: Page, server: Running, width: int = 1280, *, dark: bool = False) -> None:
    page.console.clear()
    page.open(f"{server.url}/", width, dark=dark)
    page.wait("document.getElementById('about').textContent || !document.getElementById('error').hidden")


def text(page: Page, name: str) -> str:
    found: str = page.get(f"document.getElementById('{name}').textContent")
    return found


def put(page: Page, **values: Any) -> None:
    for name, value in values.items():
        page.get(f"document.getElementById('{name}').value = {json.dumps(str(value))}")


def send(page: Page) -> None:
    page.get("document.getElementById('send').click()")
    page.wait(f"({OVER}) && !document.getElementById('send').disabled")


def test_the_page_is_one_file_with_a_closed_policy(server: Running) -> None:
    response = server.http.get("/")
    assert response.headers["content-type"].startswith("text/html")
    assert set(re.findall(r"https?://[^\s\"'`)]+", response.text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", response.text)
    assert "{{" not in response.text
    policy = dict(rule.split(" ", 1) for rule in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["script-src"].startswith("'sha256-")
    assert "unsafe" not in response.headers["content-security-policy"]


@needs_chromium
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)])
def test_the_page_shows_drafted_tokens_and_compares(
    page: Page, server: Running, width: int, dark: bool, tmp_path: Path
) -> None:
    asked: Any = {"messages": [{"role": "user", "content": ASKED}], "temperature": 0, "max_tokens": 80}
    for _ in range(3):  # the trie knows the answer
        body = server.post("/v1/chat/completions", **asked).json()
    opened(page, server, width, dark=dark)
    put(page, prompt=ASKED, max_tokens=80)
    send(page)
    answer, tokens = body["choices"][0]["message"]["content"], body["usage"]["completion_tokens"]
    assert text(page, "drafted") == text(page, "plain") == answer
    assert f"Equal: the same {tokens} tokens, " in text(page, "verdict")
    marked = page.get(
        "[...document.querySelectorAll('#drafted .token')].filter((s) => s.style.backgroundColor !== '').length"
    )
    figures = page.get(
        "[...document.querySelectorAll('#figures tbody tr')].map((r) => [...r.children].map((c) => c.textContent))"
    )
    rows = {name: (drafted, plain) for name, drafted, plain in figures}
    assert marked == int(rows["draft tokens accepted"][0]) > 0
    assert rows["draft tokens accepted"][1] == "0"
    assert rows["tokens"] == (str(tokens), str(tokens))
    assert int(rows["steps"][0]) < int(rows["steps"][1]) == tokens
    assert page.get("document.querySelectorAll('#strip g').length") == int(rows["steps"][0])
    assert page.get("document.querySelectorAll('#depths .bar').length") > 0
    assert page.get("document.documentElement.scrollWidth <= innerWidth"), "the page is no wider than the window"
    luminance = page.get("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).slice(0, 3).map(Number)")
    assert (max(luminance) < 64) == dark
    assert page.console == []
    page.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000


@needs_chromium
def test_a_click_on_a_token_shows_its_tree(page: Page, server: Running) -> None:
    opened(page, server)
    put(page, prompt=ASKED, max_tokens=60)
    for _ in range(3):  # the trie knows the answer
        page.get("document.getElementById('clear').click()")
        send(page)
    drafted = page.get(
        "[...document.querySelectorAll('#drafted .token')].findIndex((s) => s.style.backgroundColor !== '')"
    )
    page.get(f"document.querySelector('#drafted [data-token=\"{drafted}\"]').click()")
    assert page.get("document.querySelectorAll('#tree .node.accepted').length") > 0
    now = page.get("[...document.querySelectorAll('#drafted .now')].map((s) => Number(s.dataset.token))")
    assert drafted in now
    emitted = page.get("document.getElementById('facts').textContent")
    assert f" {len(now)} emitted" in emitted


@needs_chromium
def test_the_page_by_keyboard(page: Page, server: Running) -> None:
    opened(page, server)

    def tab_to(name: str) -> None:
        for _ in range(60):
            if page.get("document.activeElement.id") == name:
                return
            page.press("Tab")
        raise AssertionError(f"Tab never reaches {name}")

    tab_to("prompt")
    page.get("document.activeElement.select()")
    page.type("Name three colours.")
    page.press("Enter", "Control")
    page.wait(OVER)
    page.wait("!document.getElementById('send').disabled")
    assert text(page, "verdict").startswith("Equal")
    tab_to("slider")
    last = text(page, "which")
    page.press("ArrowLeft")
    assert text(page, "which") != last
    page.get("document.body.focus()")
    tab_to("send")
    page.press(" ")
    page.wait("document.getElementById('send').disabled")
    page.press("Escape")
    page.wait("!document.getElementById('send').disabled")
    assert server.idle(), "an answer that was stopped leaves its slot"


@needs_chromium
def test_text_is_not_markup(page: Page, server: Running) -> None:
    opened(page, server)
    put(page, prompt=HOSTILE, max_tokens=12, stop="a\ne")
    send(page)
    put(page, prompt="And then?")
    send(page)
    assert page.get("document.querySelector('.turn.user').textContent") == HOSTILE, "the dialogue so far"
    assert page.get("document.title") == "draftree"
    assert page.get("document.images.length") == 0
    messages = [{"role": "user", "content": HOSTILE}]
    body = server.post("/v1/chat/completions", messages=messages, temperature=0, max_tokens=12, stop=["a", "e"]).json()
    assert page.get("document.querySelector('.turn.assistant').textContent") == body["choices"][0]["message"]["content"]
    assert page.console == []
    page.get("document.getElementById('clear').click()")
    assert page.get("document.querySelectorAll('.turn').length") == 0


@needs_chromium
@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_the_copied_request_gives_the_same_text(page: Page, server: Running, kind: str) -> None:
    opened(page, server)
    page.get(f"document.querySelector('[value={kind}]').click()")
    put(page, prompt=HOSTILE + " it's", max_tokens=24, seed=7, temperature=0.8, top_k=20, node_budget=3)
    send(page)
    assert "(seed 7)" in text(page, "verdict"), text(page, "error")
    shown = text(page, "drafted")
    page.get("navigator.clipboard.writeText = () => Promise.reject(new Error('none'))")
    code = {}
    for name in ("curl", "python"):
        page.get(f"document.getElementById('{name}').click()")
        page.wait(f"document.querySelector('#said textarea[aria-label*={name} i]')")
        code[name] = page.get("document.querySelector('#said textarea').value")
    assert shlex.split(code["curl"])[0] == "curl"
    answer = json.loads(subprocess.run(["bash", "-c", code["curl"]], capture_output=True, check=True).stdout)[
        "choices"
    ][0]
    assert (answer["message"]["content"] if kind == "chat" else answer["text"]) == shown
    told = subprocess.run([sys.executable, "-c", code["python"]], capture_output=True, check=True, encoding="utf-8")
    assert told.stdout == shown + "\n"


@needs_chromium
def test_the_page_shows_the_server_s_errors(page: Page, demo: Any) -> None:
    with serving(*demo, api_keys=("secret",)) as locked:
        opened(page, locked)
        assert "API key is missing" in text(page, "error")
        put(page, key="secret")
        page.get("document.getElementById('key').dispatchEvent(new Event('change'))")
        page.wait("document.getElementById('error').hidden")
        put(page, max_tokens=10**7)
        send(page)
        assert "max_tokens" in text(page, "error") or "tokens" in text(page, "error")
        put(page, max_tokens=8)
        send(page)
        assert text(page, "verdict").startswith("Equal")
        assert page.get("document.getElementById('error').hidden")
        page.get("document.getElementById('curl').click()")
        page.wait("document.getElementById('said').textContent")
        assert "secret" not in (page.get("document.querySelector('#said textarea')?.value") or "")


@needs_chromium
def test_a_model_without_a_chat_template_completes_text(page: Page, demo: Any) -> None:
    tokenizer = copy.deepcopy(demo.tokenizer)
    tokenizer.chat_template = None
    with serving(demo.model, tokenizer) as server:
        opened(page, server)
        put(page, prompt="The sea", max_tokens=8)
        send(page)
        assert text(page, "drafted") == server.complete("The sea", max_tokens=8)["choices"][0]["text"]
