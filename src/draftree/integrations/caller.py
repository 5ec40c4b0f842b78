"""What Hugging Face's `generate` was given and does not hand on to a decoding loop of one's own.

It keeps `streamer` to itself, so that whoever reads from one would wait for ever, and makes an empty cache where it was
given one. Both are read off the frame of the call.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from draftree.runner.target import CACHES

DEPTH = 6  # frames between `generate` and the loop, at most


def given_to_generate() -> dict[str, Any]:
    """`streamer`, `synced_gpus` and `cache` (by any name) of the call of `generate` under way; empty for no call."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(DEPTH):
        if frame is None:
            break
        known = frame.f_locals
        if frame.f_code.co_name == "generate" and "custom_generate" in known and "generation_mode_kwargs" in known:
            held = known.get("kwargs") or {}
            caches = [held[name] for name in CACHES if held.get(name) is not None]
            given = {name: known.get(name) for name in ("streamer", "synced_gpus")}
            return given | {"cache": caches[0] if caches else None}
        frame = frame.f_back
    return {}
