"""How far the layers of a model look back: over everything, a sliding window, or a chunk."""

from __future__ import annotations

from dataclasses import dataclass

# Rows may stand further on than they are many (rows of a drafter whose forerunners were pruned); a window this close to
# the context's end is applied, which is never wrong.
MARGIN = 64


@dataclass(frozen=True, slots=True)
class LayerKind:
    """How far a layer looks.

    Attributes:
        name: Hugging Face's name (`full_attention`, `sliding_attention`, `chunked_attention`).
        window: positions seen back, the row's own included; None for no limit.
        chunk: chunk length in positions; None for no limit.
    """

    name: str = "full_attention"
    window: int | None = None
    chunk: int | None = None


def limits(kind: LayerKind, columns: int) -> bool:
    """Whether a window or chunk of `kind` may cut something off of so many columns."""
    return any(limit is not None and limit <= columns + MARGIN for limit in (kind.window, kind.chunk))
