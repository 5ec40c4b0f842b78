"""What Hugging Face's `generate` was given and does not hand on to a decoding loop of one's own.

It keeps `streamer` to itself, so that whoever reads from one would wait for ever, and makes an empty cache where it was
given one. Both are read off the frame of the call.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

DEPTH = 6  # frames between `generate` and the loop, at most


def given_to_generate() -> dict[str, Any]:
    """`streamer` and `past_key_values` of the call of `generate` under way; empty where there is none."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(DEPTH):
        if frame is None:
            break
        known = frame.f_locals
        if frame.f_code.co_name == "generate" and "custom_generate" in known and "generation_mode_kwargs" in known:
            held = known.get("kwargs") or {}
            return {"streamer": known.get("streamer"), "past_key_values": held.get("past_key_values")}
        frame = frame.f_back
    return {}
