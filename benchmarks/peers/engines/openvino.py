"""OpenVINO GenAI: plainly, with prompt lookup, and with a small model; weights exported by optimum-intel."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.worker import Ask, Ids, Job, Peer, leave

DRAFTED, MATCHED = 5, 3  # tokens of a draft, and of the n-gram that it follows


def make(job: Job) -> Peer:
    """See `Job`; in 8 bits the weights alone."""
    weights = "int8" if job.int8 else {"float32": "fp32", "bfloat16": "bf16"}[job.dtype]
    folder = exported(job.folder, Path(job.work) / f"openvino-{weights}", weights)
    hint = {"float32": "f32", "bfloat16": "bf16"}[job.dtype]
    given = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": job.threads}

    def pipeline(way: str) -> openvino_genai.LLMPipeline:
        options = dict(given)
        if way == "prompt-lookup":
            options["prompt_lookup"] = True
        if way == "draft-model":
            small = exported(job.draft, Path(job.work) / f"openvino-draft-{weights}", weights)
            options["draft_model"] = openvino_genai.draft_model(str(small), "CPU", **given)
        return openvino_genai.LLMPipeline(str(folder), "CPU", **options)

    def way(name: str, **options: int) -> Callable[[], Ask]:
        return lambda: opened(name, **options)

    def opened(name: str, **options: int) -> Ask:
        engine, config = pipeline(name), openvino_genai.GenerationConfig()
        config.max_new_tokens = job.new
        config.do_sample = False
        config.stop_token_ids = set(job.ends)
        for option, value in options.items():
            setattr(config, option, value)

        def ask(prompts: list[Ids]) -> list[Ids]:
            answers = []
            for ids in prompts:
                tokens = openvino.Tensor(np.array([ids], dtype=np.int64))
                seen = openvino.Tensor(np.ones((1, len(ids)), dtype=np.int64))
                inputs = openvino_genai.TokenizedInputs(tokens, seen)
                answers.append(engine.generate(inputs, config).tokens[0])
            return answers

        return ask

    lookup = {"num_assistant_tokens": DRAFTED, "max_ngram_size": MATCHED}
    ways = {"plain": way("plain"), "prompt-lookup": way("prompt-lookup", **lookup)}
    if job.draft:
        ways["draft-model"] = way("draft-model", num_assistant_tokens=DRAFTED)
    left_out = {"EAGLE trees": "needs an EAGLE-3 head of this model"}
    return Peer(openvino_genai.__version__, ways, left_out)


def exported(model: str, folder: Path, weights: str) -> Path:
    """The folder with the model in OpenVINO's form; written where it is not there.

    Raises:
        RuntimeError: it cannot be exported.
    """
    if folder.is_dir():
        return folder
    command = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", model]
    options = ["--task", "text-generation-with-past", "--weight-format", weights, str(folder)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"optimum-cli could not export the model: {done.stderr.strip().splitlines()[-1]}")
    return folder


if __name__ == "__main__":
    leave(make)
