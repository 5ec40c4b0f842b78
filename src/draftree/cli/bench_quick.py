"""`draftree bench quick`: Hugging Face's ways of decoding and ours, in a few minutes."""

from __future__ import annotations

from draftree.cli.measuring import Measuring
from draftree.cli.options import Compiled, DrafterWarm, Inflate, MaxNewTokens, Model, PerSet, Rounds, grouped


@grouped
def quick(
    *,
    model: Model = None,
    params: Inflate = None,
    per_set: PerSet = 4,
    max_new_tokens: MaxNewTokens = 96,
    rounds: Rounds = 2,
    drafter_warm: DrafterWarm = 23,
    compiled: Compiled = True,
    measuring: Measuring,
) -> None:
    """Hugging Face's ways of decoding and ours, interleaved in one process: speed, acceptance, equality, memory."""
    from draftree.bench.case import Settings
    from draftree.bench.files import write_json
    from draftree.bench.pictures import quick_picture, write_png
    from draftree.bench.quick import run_quick
    from draftree.bench.report import render, title
    from draftree.cli.screen import StageBar, drawn, tell_written, wide_console
    from draftree.models import load_model

    found, out = measuring.begin(), measuring.out
    settings = Settings(per_set, max_new_tokens, rounds, drafter_warm, compiled)
    console = wide_console()
    loaded, tokenizer = load_model(model)
    with StageBar(console) as bar:
        result = run_quick(loaded, tokenizer, found, settings, name=model, params=params, watcher=bar)
    console.print(render(result))
    written = [write_json(result.as_dict(), out / "bench-quick.json")]
    pictures = drawn(console, lambda: write_png(quick_picture(result), out / "bench-quick.png", title(result)))
    tell_written(console, written + pictures)
