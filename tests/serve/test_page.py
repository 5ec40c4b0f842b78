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
from devtools import Page, browsing, needs_chromium
from serve_driver import Running, serving

ASKED = "Describe the restaurant: name[Aromi], food[French], area[riverside]"
HOSTILE = "</script><img src=x onerror=\"document.title='taken'\"> & 'quoted' \u2028 中文 🙂 `$(id)` \\n"
IDLE = "!document.getElementById('send').disabled"
MARKDOWN = r"""## A *title*
Two **bold
lines**, `a*b*`, snake_case_name, 2 * 3, \*no\*, <b>markup</b>, [safe](https://a.b/c_d), [not](javascript:alert(1)).
1. one
   - nested
2. two
> quoted

| left | right |
|---|--:|
| `a|b` | ~~c~~ |

```python
if x < 1:
    **y**
"""
RENDERED = (
    "<h4>A <em>title</em></h4><p>Two <strong>bold\nlines</strong>, <code>a*b*</code>, snake_case_name, 2 * 3, *no*, "
    '&lt;b&gt;markup&lt;/b&gt;, <a href="https://a.b/c_d" target="_blank" rel="noopener noreferrer" '
    'title="https://a.b/c_d">safe</a>, [not](javascript:alert(1)).</p>'
    "<ol><li><p>one</p><ul><li><p>nested</p></li></ul></li><li><p>two</p></li></ol><blockquote><p>quoted</p></blockquote>"
    '<div class="wide" tabindex="0" role="group" aria-label="Table"><table><thead><tr>'
    '<th scope="col" style="text-align: left;">left</th><th scope="col" style="text-align: right;">right</th></tr>'
    '</thead><tbody><tr><td style="text-align: left;"><code>a|b</code></td>'
    '<td style="text-align: right;"><del>c</del></td></tr></tbody></table></div>'
    '<div class="code"><div class="bar"><span>python</span><button type="button" class="copy">Copy</button></div>'
    '<pre tabindex="0" aria-label="Code python"><code>if x &lt; 1:\n    **y**\n</code></pre></div>'
)
# A server that reasons and calls a tool: each text of the script is a delta of the answer.
SCRIPTED = r"""(() => {
  window.bodies = [];
  window.fetch = async (path, options) => {
    window.bodies.push(JSON.parse(options.body));
    const events = window.script.map(([raw, delta]) => ({choices: [{index: 0, delta, token_ids: [1],
      finish_reason: null, draftree: {pieces: [raw], drafters: ["lookahead"], trees: []}}]}));
    events.push({choices: [{index: 0, delta: {}, finish_reason: "stop"}]}, {choices: [],
      usage: {prompt_tokens: 107, prompt_tokens_details: {cached_tokens: 86}}});
    const lines = events.map((event) => `data: ${JSON.stringify(event)}\n\n`);
    return new Response(new Blob([...lines, "data: [DONE]\n\n"]).stream());
  };
})()"""
CALL = {
    "index": 0,
    "id": "call_7",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
}


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


def shown(page: Page, part: str) -> str:
    """The text of a part of the last answer."""
    found: str = page.get(
        f"[...document.querySelectorAll('.turn.assistant')].at(-1).querySelector('{part}').textContent"
    )
    return found


def press(page: Page, name: str) -> None:
    """Press a button of the last turn that has one of this name."""
    page.get(f"[...document.querySelectorAll('.acts button')].findLast((b) => b.textContent === '{name}').click()")


def put(page: Page, **values: Any) -> None:
    for name, value in values.items():
        page.get(f"document.getElementById('{name}').value = {json.dumps(str(value))}")


def send(page: Page) -> None:
    page.get("document.getElementById('send').click()")
    page.wait(IDLE)


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
    press(page, "Source")
    assert shown(page, ".answer") == shown(page, ".plain") == answer
    assert f"Equal: the same {tokens} tokens, " in shown(page, ".verdict")
    marked = page.get("[...document.querySelectorAll('.token')].filter((s) => s.style.backgroundColor !== '').length")
    figures = page.get(
        "[...document.querySelectorAll('#figures tbody tr')].map((r) => [...r.children].map((c) => c.textContent))"
    )
    rows = {name: (drafted, plain) for name, drafted, plain in figures}
    accepted = int(rows["draft tokens accepted"][0])
    assert accepted - 1 <= marked <= accepted, "all but the end token"
    assert rows["draft tokens accepted"][1] == "0"
    assert rows["tokens"] == (str(tokens), str(tokens))
    steps, plainly = map(int, rows["passes of the model"])
    assert steps < plainly == tokens
    assert f"{tokens} tokens in {steps} passes · " in shown(page, ".counted")
    most = page.get("Math.max(...[...document.querySelectorAll('#strip .hit')].map((bar) => bar.height.baseVal.value))")
    assert page.get("document.querySelector('#strip .now .hit').height.baseVal.value") == most, "the most accepted"
    assert page.get("document.querySelectorAll('#strip g').length") == steps
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
    for _ in range(3):  # the trie knows the answer
        page.get("document.getElementById('clear').click()")
        put(page, prompt=ASKED, max_tokens=60)
        send(page)
    drafted = page.get(
        "Number([...document.querySelectorAll('.token')].find((s) => s.style.backgroundColor !== '').dataset.token)"
    )
    press(page, "Source")
    page.get(f"document.querySelector('[data-token=\"{drafted}\"]').click()")
    assert page.get("document.querySelectorAll('#tree .node.accepted').length") > 0
    now = page.get("[...document.querySelectorAll('.token.now')].map((s) => Number(s.dataset.token))")
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
    page.type("Name three colours.")
    page.press("Enter")
    assert page.get("document.querySelector('.turn.user .said').textContent") == "Name three colours.", "at once"
    page.wait(IDLE)
    assert shown(page, ".verdict").startswith("Equal")
    tab_to("slider")
    last = text(page, "which")
    page.press("ArrowLeft")
    assert text(page, "which") != last
    put(page, prompt="And three more?")
    tab_to("send")
    page.press(" ")
    page.wait("document.getElementById('send').disabled")
    page.press("Escape")
    page.wait(IDLE)
    assert server.idle(), "an answer that was stopped leaves its slot"


@needs_chromium
def test_text_is_not_markup(page: Page, server: Running) -> None:
    opened(page, server)
    put(page, prompt=HOSTILE, max_tokens=12, stop="a\ne")
    send(page)
    press(page, "Source")
    assert page.get("document.querySelector('.turn.user .said').textContent") == HOSTILE
    assert page.get("document.title") == "draftree"
    assert page.get("document.images.length") == 0
    messages = [{"role": "user", "content": HOSTILE}]
    body = server.post("/v1/chat/completions", messages=messages, temperature=0, max_tokens=12, stop=["a", "e"]).json()
    assert shown(page, ".answer") == body["choices"][0]["message"]["content"]
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
    assert "(seed 7)" in shown(page, ".verdict"), text(page, "error")
    if kind == "chat":
        press(page, "Source")
    told = shown(page, ".answer")
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
    assert (answer["message"]["content"] if kind == "chat" else answer["text"]) == told
    again = subprocess.run([sys.executable, "-c", code["python"]], capture_output=True, check=True, encoding="utf-8")
    assert again.stdout == told + "\n"


@needs_chromium
def test_the_page_shows_the_server_s_errors(page: Page, demo: Any) -> None:
    with serving(*demo, api_keys=("secret",)) as locked:
        opened(page, locked)
        assert "API key is missing" in text(page, "error")
        assert page.get("document.getElementById('key').offsetHeight") > 0, "there is a place for it"
        put(page, key="secret")
        page.get("document.getElementById('key').dispatchEvent(new Event('change'))")
        page.wait("document.getElementById('error').hidden")
        put(page, max_tokens=10**7, prompt="Hello")
        send(page)
        assert "tokens" in shown(page, ".failed")
        put(page, max_tokens=8)
        press(page, "Answer again")
        page.wait(IDLE)
        assert shown(page, ".verdict").startswith("Equal")
        assert shown(page, ".failed") == ""
        put(page, prompt="Hello", more="{")
        send(page)
        assert "not JSON" in text(page, "error")
        assert page.get("document.getElementById('prompt').value") == "Hello", "and the question stays"
        put(page, more="")
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
        assert shown(page, ".answer") == server.complete("The sea", max_tokens=8)["choices"][0]["text"]


@needs_chromium
def test_markdown_is_rendered_and_grows_as_it_comes(page: Page, server: Running) -> None:
    opened(page, server)
    whole = page.get(
        f"(() => {{ const box = document.createElement('div'), text = {json.dumps(MARKDOWN)};"
        "Markdown.show(box, text); return box.innerHTML; })()"
    )
    assert whole == RENDERED
    grown = page.get(
        f"(() => {{ const box = document.createElement('div'), text = {json.dumps(MARKDOWN)}; let first;"
        "for (let end = 0; end <= text.length; end++) {"
        "  Markdown.show(box, text.slice(0, end));"
        "  if (end === 20) first = box.firstChild; }"
        "return [box.innerHTML, box.firstChild === first]; })()"
    )
    assert grown == [RENDERED, True], "the same, and blocks that are complete stay"
    # A leaf is given each visible piece with its place in the text.
    assert (
        page.get(
            f"(() => {{ const box = document.createElement('div'), text = {json.dumps(MARKDOWN)}; const wrong = [];"
            "Markdown.show(box, text, (at, piece) => {"
            "  if (text.slice(at, at + piece.length) !== piece) wrong.push([at, piece]); return [piece]; });"
            "return wrong; })()"
        )
        == []
    )
    for evil in (
        ">" * 5000,
        "*a " * 5000,
        "[" * 5000,
        "- " * 3000,
        "`a" * 5000,
        "|" * 5000 + "\n|--|--|",
        "**_" * 3000,
    ):
        began = "performance.now()"
        took = page.get(
            f"(() => {{ const began = {began}; Markdown.show(document.createElement('div'), {json.dumps(evil)});"
            f"return {began} - began; }})()"
        )
        assert took < 3000, evil[:9]


@needs_chromium
def test_reasoning_and_calls_are_shown_and_answered(page: Page, server: Running) -> None:
    opened(page, server)
    page.get(SCRIPTED)
    put(page, drafting="on", prompt="How is the weather?")
    script: Any = [
        ["<think>Hm **so**", {"reasoning_content": "Hm **so**"}],
        ["</think>Let me *see*.", {"content": "Let me *see*."}],
    ]
    page.get(f"window.script = {json.dumps([*script, ['<call>', {'tool_calls': [CALL]}]])}")
    send(page)
    assert shown(page, ".reasoning strong") == "so"
    assert not page.get("document.querySelector('.reasoning').open"), "closed once the answer begins"
    assert shown(page, ".answer em.token, .answer em .token") == "see"
    assert json.loads(shown(page, ".calls code")) == {"city": "Oslo"}
    assert "107 prompt tokens (86 cached)" in shown(page, ".counted")
    assert text(page, "prompt-label") == "Result of weather"
    page.get("window.script = [['Sunny.', {content: 'Sunny.'}]]")
    put(page, prompt="21 degrees")
    send(page)
    assert shown(page, ".answer") == "Sunny."
    question, answer, result = page.get("window.bodies.at(-1).messages")
    assert question == {"role": "user", "content": "How is the weather?"}
    called = {name: CALL[name] for name in ("id", "type", "function")}
    assert answer == {"role": "assistant", "content": "Let me *see*.", "tool_calls": [called]}
    assert result == {"role": "tool", "tool_call_id": "call_7", "content": "21 degrees"}
    page.get("[...document.querySelectorAll('.acts button')].find((b) => b.textContent === 'Edit').click()")
    assert page.get("document.getElementById('prompt').value") == "How is the weather?"
    put(page, prompt="And the sea?")
    send(page)
    assert page.get("window.bodies.at(-1).messages") == [{"role": "user", "content": "And the sea?"}]
    assert page.get("document.querySelectorAll('.turn').length") == 2, "an edited question replaces what follows"


@needs_chromium
def test_an_example_answers_and_offers_its_second_question(page: Page, server: Running) -> None:
    opened(page, server, 400)
    assert server.app.state.server.settings.model_name in text(page, "parts")
    put(page, max_tokens=8)
    page.get("document.querySelector('#examples button').click()")
    page.wait(IDLE)
    assert page.get("document.getElementById('empty').hidden")
    question = page.get("document.querySelector('.turn.user').getBoundingClientRect().top")
    assert -1 <= question < 900, "the question is in view, and the answer below it"
    assert shown(page, ".verdict").startswith("Equal")
    assert "type hints" in page.get("document.getElementById('prompt').value")
