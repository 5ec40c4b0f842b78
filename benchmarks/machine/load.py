"""A load on an OpenAI-compatible server, from a process of its own: python -m benchmarks.machine.load, JSON in and out.

Standard input has {"url", "model", "texts", "concurrency", "max_tokens", "stream"}; standard output gets
{"seconds", "tokens", "first": seconds to the first token of each answer, "answers": texts}.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import httpx


async def load(asked: dict[str, Any]) -> dict[str, Any]:
    """Send all texts as chats, so many at a time, and keep what comes."""
    gate, tokens, first = asyncio.Semaphore(asked["concurrency"]), 0, []
    answers = [""] * len(asked["texts"])

    async def one(http: httpx.AsyncClient, i: int) -> None:
        nonlocal tokens
        body = {"model": asked["model"], "messages": [{"role": "user", "content": asked["texts"][i]}]}
        body |= {"max_tokens": asked["max_tokens"], "temperature": 0.0, "stream": asked["stream"]}
        async with gate:
            began = time.perf_counter()
            if not asked["stream"]:
                response = await http.post("/v1/chat/completions", json=body)
                response.raise_for_status()
                found = response.json()
                answers[i], tokens = found["choices"][0]["message"]["content"], tokens + used(found)
                return
            body["stream_options"] = {"include_usage": True}
            async with http.stream("POST", "/v1/chat/completions", json=body) as stream:
                stream.raise_for_status()
                async for line in stream.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    chunk = json.loads(line.removeprefix("data: "))
                    tokens += used(chunk)
                    piece = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                    if piece and not answers[i]:
                        first.append(time.perf_counter() - began)
                    answers[i] += piece

    async with httpx.AsyncClient(base_url=asked["url"], timeout=600) as http:
        await one(http, 0)
        tokens = 0
        first.clear()
        answers[0] = ""
        began = time.perf_counter()
        await asyncio.gather(*(one(http, i) for i in range(len(answers))))
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "tokens": tokens, "first": first, "answers": answers}


def used(found: dict[str, Any]) -> int:
    """New tokens by the usage of an answer or chunk; 0 where it tells none."""
    return int((found.get("usage") or {}).get("completion_tokens", 0))


if __name__ == "__main__":
    print(json.dumps(asyncio.run(load(json.load(sys.stdin)))))
