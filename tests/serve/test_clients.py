"""Run LangChain, LiteLLM, lm-evaluation-harness and GuideLLM against a server.

They need the environment `.venv-clients` of `make test-clients`.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from real_tokenizers import real_tokenizer
from serve_driver import Running, serving
from tool_chat import Script
from transformers import LlamaConfig, LlamaForCausalLM

from draftree.serve import calls

ROOT = Path(__file__).parents[2]
BIN = Path(os.environ.get("DRAFTREE_CLIENTS", ROOT / ".venv-clients")) / "bin"
TOKENIZER = ROOT / "src" / "draftree" / "data" / "chat_4m"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (BIN / "python").exists(), reason="needs make test-clients"),
]

LANGCHAIN = """
import sys
from langchain_openai import ChatOpenAI
chat = ChatOpenAI(model="draftree", base_url=sys.argv[1] + "/v1", api_key="none", temperature=0, max_tokens=24)
whole = chat.invoke("Tell me about the sea.")
assert "".join(piece.content for piece in chat.stream("Tell me about the sea.")) == whole.content
assert [m.content for m in chat.batch(["Tell me about the sea."] * 3)] == [whole.content] * 3
assert whole.usage_metadata["output_tokens"] == 24
print(whole.content)
"""
TOOLS = """
import sys
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

@tool
def weather(city: str) -> str:
    "Tell the weather of a city."
    return f"Rain in {city}."

class City(BaseModel):
    city: str

own = dict(model="draftree", base_url=sys.argv[1] + "/v1", api_key="none", temperature=0)
for more in ({}, {"use_responses_api": True, "output_version": "responses/v1"}):
    chat, asked = ChatOpenAI(**own, **more), HumanMessage("The weather in Oslo?")
    for fields in ({}, {"strict": True}, {"tool_choice": "any"}, {"parallel_tool_calls": False}):
        bound = chat.bind_tools([weather], **fields)
        pieces = list(bound.stream([asked]))
        for said in (bound.invoke([asked]), sum(pieces[1:], pieces[0])):
            (call,) = said.tool_calls
            assert (call["name"], call["args"]) == ("weather", {"city": "Oslo"}), said
            last = chat.bind_tools([weather]).invoke([asked, said, weather.invoke(call)])
            assert last.text == "It rains.", last
    assert chat.with_structured_output(City, method="json_schema").invoke([asked]) == City(city="Oslo")
print("done")
"""
LITELLM = """
import sys
import litellm
for model in ("openai/draftree", "hosted_vllm/draftree"):
    asked = dict(model=model, api_base=sys.argv[1] + "/v1", api_key="none", temperature=0, max_tokens=24,
                 messages=[{"role": "user", "content": "Tell me about the sea."}])
    whole = litellm.completion(**asked).choices[0].message.content
    assert "".join(c.choices[0].delta.content or "" for c in litellm.completion(**asked, stream=True)) == whole
print(whole)
"""
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
"""
CHOICE = """doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
WRITTEN = """doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 24, do_sample: false, temperature: 0}
metric_list: [{metric: bleu, aggregation: bleu, higher_is_better: true}]
"""


def run(*command: Any, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [BIN / command[0], *map(str, command[1:])],
        env=os.environ | OFFLINE,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("script", [LANGCHAIN, LITELLM], ids=["langchain", "litellm"])
def test_chat_clients(server: Running, script: str) -> None:
    asked = {"messages": [{"role": "user", "content": "Tell me about the sea."}], "temperature": 0, "max_tokens": 24}
    said = server.post("/v1/chat/completions", **asked).json()["choices"][0]["message"]["content"]
    assert run("python", "-c", script, server.url).strip() == said.strip()


def test_tools_of_langchain_with_qwen_s_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model thinks, and calls; its markers are tokens and not special."""
    tokenizer = real_tokenizer("qwen3")
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'

    def script(body: Any, prompt: int) -> list[Script]:
        said = call if body.tool_choice == "required" else f"Sure.\n{call}"
        said = "It rains." if body.messages[-1].role == "tool" else '{"city": "Oslo"}' if body.response_format else said
        return [Script(tokenizer, prompt, f"<think>\nLet me see.\n</think>\n\n{said}")]

    monkeypatch.setattr(calls, "_penalties", script)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**shape, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    with serving(LlamaForCausalLM(config).eval(), tokenizer) as server:
        assert run("python", "-c", TOOLS, server.url).strip() == "done"


def test_the_evaluation_harness_scores_equally_without_drafting(demo: Any, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    rows = [
        {
            "question": f"The number {i} plus one is",
            "choices": [f" {i + 1}", " the sea", " nothing at all"],
            "answer": 0,
        }
        for i in range(12)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, kind, rest in (("chosen", "multiple_choice", CHOICE), ("written", "generate_until", WRITTEN)):
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, data=data, kind=kind) + rest)
    found = []
    for drafter in ("lookahead", None):
        with serving(*demo, drafter) as server:
            given = f"model=draftree,base_url={server.url}/v1/completions,tokenizer={TOKENIZER},num_concurrent=2"
            tasks = ("--include_path", tmp_path, "--tasks", "chosen,written", "--output_path", tmp_path / str(drafter))
            run("lm_eval", "--model", "local-completions", "--model_args", given, *tasks, cwd=tmp_path)
            (result,) = (tmp_path / str(drafter)).rglob("results_*.json")
            found.append(json.loads(result.read_text())["results"])
    assert found[0] == found[1]
    assert found[0]["chosen"]["acc,none"] == 1.0


def test_guidellm(server: Running, tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"Tell me about ship {i}."}) + "\n" for i in range(6)))
    options = {
        "backend": f"kind=openai_http,target={server.url}",
        "data": f"kind=json_file,path={data}",
        "profile": "kind=concurrent,streams=2",
        "constraint": "kind=max_requests,count=6",
        "tokenizer": f"kind=huggingface_auto,model={TOKENIZER}",
    }
    arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
    run("guidellm", "run", *arguments, "--disable-progress", cwd=tmp_path)
    report = json.loads((tmp_path / "benchmarks.json").read_text())
    requests = report["benchmarks"][0]["metrics"]["request_totals"]
    assert (requests["successful"], requests["errored"]) == (6, 0)
