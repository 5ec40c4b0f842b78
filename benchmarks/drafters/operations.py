"""Arithmetic and memory operations of decoding, counted pass by pass (BiLD, section 7.3.1 and figure 8).

From the shapes of the model's matrices follow the operations of a pass. With W values in the decoder's matrices and its
head, A their inputs and outputs together, L layers, q values of a query and k of a key or value row, s tokens of the
source (0 for decoder-only models), a pass of r rows which together see p columns, after c committed ones, takes

    operations        2 r W  +  4 L q p  +  4 L q r s
    values moved      W  +  r A  +  2 L k (c + r + s)

that is: a multiplication and an addition for each weight and row; the products of queries with keys and of weights with
values; all weights once a pass, whatever the rows; what goes into every matrix and comes out of it; cached keys and
values read, new ones written, those of the source read. A source is read once by its encoder of M values (inputs and
outputs B together, layers E), whose cross-attention keys and values come from matrices of X values:

    operations        2 s (M + X)  +  4 E q s s
    values moved      M + X  +  s B  +  2 E k s

Arithmetic intensity is operations per value moved. Embedding look-ups, norms and softmax are left out: they are small.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from benchmarks.harness.passes import watching
from draftree.runner import open_runner

CROSS = ("EncDecAttention", "encoder_attn", "crossattention", "encoder_decoder_attention")


@dataclass(slots=True)
class Operations:
    """What was done: additions and multiplications, and values read or written."""

    flops: float = 0.0
    moved: float = 0.0

    @property
    def intensity(self) -> float:
        """Operations per value moved."""
        return self.flops / self.moved if self.moved else 0.0

    def add(self, flops: float, moved: float) -> None:
        """Add what else was done."""
        self.flops, self.moved = self.flops + flops, self.moved + moved


class Shapes:
    """The sizes of a model's matrices, by where their rows come from; see the head of this file for the letters."""

    def __init__(self, model: Any) -> None:
        config = model.config
        self.weights = self.widths = self.encoder = self.encoder_widths = self.cross = 0
        for name, module in model.named_modules():
            weight = getattr(module, "weight", None)
            if weight is None or weight.dim() != 2 or isinstance(module, nn.Embedding):
                continue
            parts = name.split(".")
            if any(part in CROSS for part in parts) and parts[-1] in ("k", "v", "k_proj", "v_proj", "key", "value"):
                self.cross += weight.numel()
            elif "encoder" in parts and config.is_encoder_decoder:
                self.encoder += weight.numel()
                self.encoder_widths += sum(weight.shape)
            else:
                self.weights += weight.numel()
                self.widths += sum(weight.shape)
        both = (getattr(config, name, None) for name in ("num_decoder_layers", "decoder_layers"))
        self.layers = next((n for n in both if n), config.num_hidden_layers)
        self.encoder_layers = config.num_hidden_layers if config.is_encoder_decoder else 0
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.query = heads * size
        self.key = (getattr(config, "num_key_value_heads", None) or heads) * size

    def source(self, tokens: int) -> tuple[float, float]:
        """Operations and values moved of reading a source of so many tokens; nothing for a decoder-only model."""
        if not self.encoder_layers:
            return 0.0, 0.0
        matrices = self.encoder + self.cross
        return (
            2.0 * tokens * matrices + 4.0 * self.encoder_layers * self.query * tokens**2,
            matrices + tokens * self.encoder_widths + 2.0 * self.encoder_layers * self.key * tokens,
        )

    def decoder(self, rows: int, seen: int, context: int, source: int) -> tuple[float, float]:
        """Return the same of a pass of `rows` rows that see `seen` columns together, after `context` committed ones."""
        return (
            2.0 * rows * self.weights + 4.0 * self.layers * self.query * (seen + rows * source),
            self.weights + rows * self.widths + 2.0 * self.layers * self.key * (context + rows + source),
        )


def operations_of(ask: Any, models: Sequence[Any], prompts: Sequence[Sequence[int]]) -> list[Operations]:
    """Operations of answering `prompts` one by one, prompt by prompt; `models` are all that take part."""
    done: list[Operations] = []
    held = [(open_runner(model), Shapes(model)) for model in models]

    def see(shapes: Shapes, source: int, rows: int, seen: int, context: int, result: Any) -> None:
        done[-1].add(*shapes.decoder(rows, seen, context, source))

    for ids in prompts:
        done.append(Operations())
        with ExitStack() as stack:
            for runner, shapes in held:
                source = len(ids) if shapes.encoder_layers else 0
                done[-1].add(*shapes.source(source))
                stack.enter_context(watching(runner, partial(see, shapes, source)))
            ask([ids])
    return done


def total(done: Sequence[Operations]) -> Operations:
    """Of several prompts together."""
    return Operations(sum(one.flops for one in done), sum(one.moved for one in done))
