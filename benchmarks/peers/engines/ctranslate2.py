"""CTranslate2: plainly, as it drafts nothing; weights written by its own converter."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ctranslate2

from benchmarks.peers.worker import Ids, Job, Peer, convert_apart, leave


def make(job: Job) -> Peer:
    """See `Job`; in 8 bits its "int8", weights and activations."""
    kind = "int8" if job.int8 else job.dtype
    folder = Path(job.work) / f"ctranslate2-{kind}"
    if not folder.is_dir():
        convert_apart("benchmarks.peers.engines.ctranslate2", job.folder, str(folder), kind)
    vocabulary: list[str] = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))
    generator = ctranslate2.Generator(str(folder), compute_type=kind, intra_threads=job.threads)

    def plain(prompts: list[Ids]) -> list[Ids]:
        results = generator.generate_batch(
            [[vocabulary[token] for token in ids] for ids in prompts],
            max_length=job.new,
            beam_size=1,
            sampling_topk=1,
            include_prompt_in_result=False,
            end_token=list(job.ends),
            return_end_token=True,
        )
        return [result.sequences_ids[0] for result in results]

    return Peer(ctranslate2.__version__, {"plain": lambda: plain}, batches=True)


def convert(model: str, folder: str, kind: str) -> None:
    """Write the model's weights into a folder in CTranslate2's form."""
    ctranslate2.converters.TransformersConverter(model).convert(folder, quantization=kind)


if __name__ == "__main__":
    if sys.argv[1:]:
        convert(*sys.argv[1:])
    else:
        leave(make)
