"""The curve that a training run leaves: figures, and a picture."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from draftree.files import replacing, write_text


def write_curve(history: list[dict[str, Any]], folder: Path, title: str) -> list[Path]:
    """Write curve.json, and curve.png where matplotlib is installed; returns the paths.

    Args:
        history: Hugging Face's log: entries with `step` and `loss`, or with `eval_loss` and `eval_accuracy`.
        folder: where to.
        title: of the picture.
    """
    curve = {
        "loss": [[entry["step"], entry["loss"]] for entry in history if "loss" in entry],
        "dev_loss": [[entry["step"], entry["eval_loss"]] for entry in history if "eval_loss" in entry],
        "dev_accuracy": [[entry["step"], entry["eval_accuracy"]] for entry in history if "eval_accuracy" in entry],
    }
    written = [folder / "curve.json"]
    write_text(written[0], json.dumps(curve) + "\n")
    if find_spec("matplotlib") is not None:
        written.append(_draw(curve, folder / "curve.png", title))
    return written


def _draw(curve: dict[str, Any], path: Path, title: str) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    losses, shares = figure.subplots(1, 2)
    if curve["loss"]:
        losses.plot(*zip(*curve["loss"], strict=True), color="0.7", linewidth=1, label="training")
    losses.plot(*zip(*curve["dev_loss"], strict=True), color="C0", marker=".", label="dev")
    losses.set_ylim(0, 1.3 * max(loss for _, loss in curve["dev_loss"]))
    losses.set_title("Loss", loc="left", fontsize=11)
    steps = [step for step, _ in curve["dev_accuracy"]]
    for depth, _ in enumerate(curve["dev_accuracy"][-1][1]):
        top = [100 * scores[depth][0] for _, scores in curve["dev_accuracy"]]
        shares.plot(steps, top, color=f"C{depth}", marker=".", label=f"depth {depth + 1}")
    shares.set_title("Truth is the likeliest token, % of dev cases", loc="left", fontsize=11)
    for axis in (losses, shares):
        axis.set_xlabel("step")
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=9, color="0.35", parse_math=False)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110)
    return path
