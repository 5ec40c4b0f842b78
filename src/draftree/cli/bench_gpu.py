"""`draftree bench gpu`: everything that is asked of a GPU, in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def gpu(
    shape: Annotated[str, typer.Option(help="Shape of the inflated model.")] = "llama-7b",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cuda, cuda:1, ..")] = "cuda",
    model: Annotated[
        str | None, typer.Option(help="Model folder or hub name to inflate.", show_default="the embedded model")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with a 'prompt' each, or a folder of such files.", show_default="those of the package"
        ),
    ] = None,
    per_set: Annotated[int, typer.Option(min=1, help="Prompts of every set, as far as the time goes.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 96,
    rounds: Annotated[int, typer.Option(min=1, help="How often a step of each kind is timed.")] = 7,
    context: Annotated[int, typer.Option(min=1, help="Tokens before the rows of a step.")] = 256,
    drafter_warm: Annotated[int, typer.Option(min=0, help="Prompts of every set that warm the trie.")] = 23,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Measure HF with static cache and torch.compile.")
    ] = True,
    minutes: Annotated[float, typer.Option(min=0, help="That all may take; fewer prompts where it is long.")] = 8,
    out: Annotated[Path, typer.Option(help="Folder for bench-gpu.json and bench-gpu.png.")] = Path("bench-results"),
) -> None:
    """A CUDA device against its memory's speed and Hugging Face's ways: steps, answers, batches, in one file."""
    from draftree.bench.gpu import GpuSettings, check_device, run_gpu
    from draftree.bench.models import load_model
    from draftree.bench.prompts import embedded_prompts, read_prompts
    from draftree.bench.sizes import dtype_named, size_named
    from draftree.cli.common import StageBar, show_findings, wide_console

    size_named(shape)
    kind = dtype_named(dtype)
    assert kind is not None
    check_device(device)
    found = embedded_prompts() if prompts is None else read_prompts(prompts)
    out.mkdir(parents=True, exist_ok=True)
    settings = GpuSettings(
        per_set, max_new_tokens, rounds, context, drafter_warm, compiled=compiled, seconds=60 * minutes
    )
    console = wide_console()
    loaded, tokenizer = load_model(model)
    with StageBar(console) as bar:
        findings, about = run_gpu(
            loaded, tokenizer, found, settings, shape=shape, dtype=kind, device=device, name=model, watcher=bar
        )
    show_findings(console, findings, about, out, "gpu")
