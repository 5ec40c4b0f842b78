"""Start a server and ask it, as any client of the OpenAI API does."""

import subprocess
import sys

import httpx

from draftree.models import packaged_model

model = sys.argv[1] if len(sys.argv) > 1 else packaged_model() or "embedded"
command = [sys.executable, "-m", "draftree", "serve", "--model", model, "--port", "0"]
with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
    try:
        url = next(word for line in server.stdout for word in line.split() if word.endswith("/v1"))
        body = {
            "model": httpx.get(f"{url}/models").json()["data"][0]["id"],
            "messages": [{"role": "user", "content": "Write a shell command to count the lines of a file."}],
            "max_tokens": 32,
            "temperature": 0,
        }
        answer = httpx.post(f"{url}/chat/completions", json=body, timeout=60).json()
        print(answer["choices"][0]["message"]["content"])
        print("tokens:", answer["usage"]["completion_tokens"])
    finally:
        server.terminate()
