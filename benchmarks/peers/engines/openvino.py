"""OpenVINO GenAI: plainly, with prompt lookup, and with a small model; weights exported by optimum-intel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.worker import Ask, Ids, Job, Peer, convert_apart, leave

DRAFTED, MATCHED = 5, 3  # tokens of a draft, and of the n-gram that it follows


def make(job: Job) -> Peer:
    """See `Job`; in 8 bits the weights alone.

    In float32 it reads weights of 16 bits, in which most models are published, faster than those of 32. Its exporter
    knows no bfloat16, which the hint makes of float32. Of a model from a GGUF file it has weights of 4 and 8 bits.
    """
    weights = "int8" if job.int8 else {"float32": "fp16", "bfloat16": "fp32"}[job.dtype]
    weights = "int4" if job.gguf else weights
    hint = {"float32": "f32", "bfloat16": "bf16"}[job.dtype]
    given = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": job.threads}

    def way(form: str = weights, **drafting: Any) -> Ask:
        folder = exported(job.folder, Path(job.work) / f"openvino-{form}", form)
        engine = openvino_genai.LLMPipeline(str(folder), "CPU", **given, **drafting)
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = job.new
        config.do_sample = False
        config.stop_token_ids = set(job.ends)
        if drafting:
            config.num_assistant_tokens = DRAFTED
        if "prompt_lookup" in drafting:
            config.max_ngram_size = MATCHED

        def together(prompts: list[Ids]) -> list[Ids]:
            width = max(map(len, prompts))
            tokens = np.array([[0] * (width - len(ids)) + ids for ids in prompts], dtype=np.int64)
            seen = np.array([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], dtype=np.int64)
            inputs = openvino_genai.TokenizedInputs(openvino.Tensor(tokens), openvino.Tensor(seen))
            return [list(ids) for ids in engine.generate(inputs, config).tokens]

        def ask(prompts: list[Ids]) -> list[Ids]:
            groups = [[ids] for ids in prompts] if drafting else [prompts]  # it drafts for one prompt at a time
            return [ids for group in groups for ids in together(group)]

        return ask

    def assisted() -> Ask:
        small = exported(job.draft, Path(job.work) / f"openvino-draft-{weights}", weights)
        return way(draft_model=openvino_genai.draft_model(str(small), "CPU", **given))

    ways: dict[str, Callable[[], Ask]] = {"plain": way, "prompt-lookup": partial(way, prompt_lookup=True)}
    if job.draft:
        ways["draft-model"] = assisted
    if job.gguf:
        ways |= {"plain int8": partial(way, "int8"), "prompt-lookup int8": partial(way, "int8", prompt_lookup=True)}
    left_out = {"EAGLE trees": "needs an EAGLE-3 head of this model"}
    return Peer(openvino_genai.__version__, ways, left_out, batches=True)


def exported(model: str, folder: Path, weights: str) -> Path:
    """The folder with the model in OpenVINO's form, written where it is not there; a RuntimeError where that fails."""
    if folder.is_dir():
        return folder
    options: tuple[str, ...] = ("--task", "text-generation-with-past", "--weight-format", weights, str(folder))
    if weights == "int4":  # the default group of 128 does not divide the inputs of every model
        options = (*options[:-1], "--group-size", "64", options[-1])
    convert_apart("optimum.commands.optimum_cli", "export", "openvino", "--model", model, *options)
    return folder


if __name__ == "__main__":
    leave(make)
