"""EAGLE-3 and P-EAGLE: a decoder layer that reads the target's hidden states of three layers beside the next token.

EAGLE-3 (Li et al., 2025) reads its own output for the deeper tokens, one pass a depth. P-EAGLE has a learnt state in
the place of what it does not know yet, and drafts all depths in one pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftree.drafting.base import RequestState
from draftree.drafting.published.compiled import CompiledLayers, compiled
from draftree.drafting.published.features import Sizes, Text
from draftree.drafting.published.files import draft_vocabulary, fill, layer_config, read_config, read_tensors
from draftree.drafting.published.layers import Attention, Head, Span, linear, stock_parts
from draftree.drafting.published.recursion import RecursiveDrafter
from draftree.runner import Runner
from draftree.runner.target import Target
from draftree.tree import TokenTree

LEFT_OUT = ("t2d", "d2t")  # tensors that are read elsewhere, or in training alone


@dataclass(frozen=True, slots=True)
class EagleLayout:
    """What a folder's configuration says of its head.

    Attributes:
        config: of the layers.
        target_hidden_size: width of the target's hidden states.
        vocab_size, draft_vocab_size: token ids of the target and of the head.
        taps: layers of the target whose incoming hidden states are read; None for the default.
        norm_before_residual: whether the residual stream begins with the normed feature.
        norm_before_fc: whether one norm stands before the fusion of hidden states.
        fc_norm: whether each of them has a norm of its own.
        norm_fed_back: whether the next depth reads the output behind the last norm.
        norm_before_head: whether the head reads it.
        mask_token: of P-EAGLE; None for EAGLE-3.
    """

    config: Any
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, ...] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_fed_back: bool = False
    norm_before_head: bool = True
    mask_token: int | None = None

    @classmethod
    def of(cls, folder: Path, config: Mapping[str, Any]) -> EagleLayout:
        """Read a configuration of speculators, of SpecForge or of EAGLE's own code.

        Raises:
            ValueError: layer numbers that disagree, or layers of another kind.
        """
        speculators = "speculators_model_type" in config
        layer = layer_config(config, folder)
        vocabulary = int(config.get("vocab_size") or layer.vocab_size)
        return cls(
            layer,
            int(config.get("target_hidden_size") or layer.hidden_size),
            vocabulary,
            int(config.get("draft_vocab_size") or vocabulary),
            _taps(folder, config),
            bool(config.get("norm_before_residual")),
            bool(config.get("norm_before_fc")),
            bool(config.get("fc_norm")),
            # One key with two meanings: speculators feeds back what is normed, SpecForge's head reads it.
            norm_fed_back=speculators and bool(config.get("norm_output")),
            norm_before_head=speculators or config.get("norm_output") is not False,
            mask_token=config.get("mask_token_id"),
        )

    def taps_of(self, layers: int) -> tuple[int, ...]:
        """Return the taps in a target of so many layers: by default a low, a middle and a high one."""
        return self.taps or (2, layers // 2, layers - 3)


def _taps(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the tapped layers; `eagle_config` numbers the outputs of layers, the other key their inputs."""
    name = "eagle_aux_hidden_state_layer_ids"
    inputs, outputs = config.get(name), (config.get("eagle_config") or {}).get(name)
    found = {tuple(int(i) for i in ids) for ids in (inputs, outputs and [i + 1 for i in outputs]) if ids}
    if len(found) > 1:
        raise ValueError(
            f"{folder / 'config.json'} names layers twice, {inputs} as inputs and {outputs} as outputs (one less), "
            f"which disagree: remove the wrong {name}."
        )
    return next(iter(found), None)


class EagleLayer(nn.Module):
    """A decoder layer; the first one reads embeddings beside features, and keeps features as its residual stream."""

    def __init__(self, layout: EagleLayout, *, first: bool) -> None:
        super().__init__()
        width = layout.config.hidden_size
        self.mlp, norm, _ = stock_parts(layout.config)
        self.first, self.norm_before_residual = first, layout.norm_before_residual
        if first:
            self.hidden_norm = norm()
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.self_attn = Attention(layout.config, 2 * width if first else width)

    def enter(self, embeddings: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual stream and the input of attention."""
        if not self.first:
            return x, self.input_layernorm(x)
        normed = self.hidden_norm(x)
        return normed if self.norm_before_residual else x, torch.cat([self.input_layernorm(embeddings), normed], -1)


class EagleHead(Head):
    """The weights of a head, by the names of speculators' files.

    Args:
        layout: of its folder.
        tapped: how many hidden states are fused.
        own: optional tensors that the folder has: "embed_tokens", "lm_head", "mask_hidden".
    """

    def __init__(self, layout: EagleLayout, tapped: int, own: Sequence[str]) -> None:
        config, width = layout.config, layout.config.hidden_size
        super().__init__(width, layout.vocab_size, layout.draft_vocab_size, own)
        self.layout = layout
        with torch.device("meta"):
            _, norm, rope = stock_parts(config)
            taken = tapped * layout.target_hidden_size
            self.fc = linear(taken, width, bias=bool(getattr(config, "bias", False)))
            layers = range(config.num_hidden_layers)
            self.layers = nn.ModuleList(EagleLayer(layout, first=i == 0) for i in layers)
            self.norm = norm()
            self.input_norm = norm(taken) if layout.norm_before_fc else None
            norms = [norm(layout.target_hidden_size) for _ in range(tapped)] if layout.fc_norm else []
            self.fc_norm = nn.ModuleList(norms)
            if "mask_hidden" in own:
                self.mask_hidden = nn.Parameter(torch.empty(1, 1, taken, dtype=torch.float32, device="meta"))
        with torch.device("cpu"):
            self.rope = rope(config)

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        """Return features [..., width] of tapped hidden states, each [..., d]."""
        if self.fc_norm:
            taps = [norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)]
        joined = torch.cat(list(taps), -1)
        features: Tensor = self.fc(joined if self.input_norm is None else self.input_norm(joined))
        return features

    def forward(self, embeddings: Tensor, features: Tensor, positions: Tensor, spans: Sequence[Span]) -> Tensor:
        """Pass rows through the layers.

        Args:
            embeddings: [R, width], of each row's next token.
            features: [R, width], what `fuse` or an earlier row returned.
            positions: LongTensor [R].
            spans: of the requests, in the order of their rows.

        Returns:
            [R, width], before the last norm.
        """
        x, angles = features, self.rope(features, positions[None])
        layer: Any
        for number, layer in enumerate(self.layers):
            residual, inputs = layer.enter(embeddings, x)
            x = residual + layer.self_attn(number, inputs, angles, spans)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x

    def unknown(self) -> Tensor:
        """Return the feature [width] of a row whose hidden states are not known yet (P-EAGLE)."""
        return self.fuse(self.mask_hidden[0, 0].split(self.layout.target_hidden_size))

    def fed_back(self, out: Tensor) -> Tensor:
        """Return the features of the next depth, from an output."""
        return self.norm(out) if self.layout.norm_fed_back else out

    def head_input(self, out: Tensor) -> Tensor:
        """Return what the head reads of an output."""
        return self.norm(out) if self.layout.norm_before_head else out


class Eagle3(RecursiveDrafter):
    """Drafts with an EAGLE-3 head; made by `draftree.load_drafter`.

    Args:
        head: its weights.
        taps: layers of the target that it reads.
        vocabulary: the target's token id of each draft id; None where they are the same.
    """

    name = kind = "eagle-3"

    def __init__(self, head: EagleHead, taps: Sequence[int], vocabulary: Tensor | None = None) -> None:
        layout = head.layout
        super().__init__(head, Sizes(layout.target_hidden_size, None, layout.vocab_size), taps, vocabulary)
        self._compiled: CompiledLayers | None = None

    @classmethod
    def load(cls, folder: Path, layers: int) -> Eagle3:
        """Read a folder for a target with so many layers.

        Raises:
            ValueError: files that do not fit together.
        """
        layout = EagleLayout.of(folder, read_config(folder))
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in read_tensors(folder).items()}
        own = [name for name in ("embed_tokens", "lm_head") if f"{name}.weight" in tensors]
        taps = layout.taps_of(layers)
        vocabulary = draft_vocabulary(tensors, layout.draft_vocab_size)
        head = EagleHead(layout, len(taps), [*own, *(["mask_hidden"] if "mask_hidden" in tensors else [])])
        fill(head, tensors, folder, LEFT_OUT)
        kind = Eagle3 if "mask_hidden" not in tensors else PEagle
        return kind(head, taps, vocabulary)

    def features_of(self, taps: Sequence[Tensor], runner: Runner) -> Tensor:
        features: Tensor = self.head.fuse(taps)
        return features

    def _place(self, target: Target) -> None:
        super()._place(target)
        self._compiled = self._compiled or compiled(self.head)

    def _text(self, tokens: list[int], first: int = 0) -> Text:
        text = super()._text(tokens, first)
        if self._compiled is not None:
            text.states = self._compiled.slot()
        return text

    @property
    def layers(self) -> Any:
        return self._compiled or self.head


class PEagle(Eagle3):
    """Drafts with a P-EAGLE head; made by `draftree.load_drafter`. See `Eagle3`."""

    name = kind = "p-eagle"

    def draft_live(self, requests: Sequence[RequestState], budgets: Sequence[int], reaches: Sequence[int]) -> TokenTree:
        reaches = [min(reach, self.depth) for reach in reaches]
        live = [request for request, reach in zip(requests, reaches, strict=True) if reach > 0]
        outputs = torch.stack(self._read(live, max(reaches) - 1))
        return self.product(requests, budgets, reaches, self.logits(requests, self.head.head_input(outputs)))
