"""MTP heads, which lie in the target's own checkpoint: a decoder layer of the target's kind.

It reads what the target's last norm returns beside the next token, and its own normed output for the deeper tokens
(DeepSeek-V3, arXiv 2412.19437, section 2.2). Hugging Face's loaders skip its tensors, so they are read from the files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftree.drafting.published.features import Sizes
from draftree.drafting.published.files import Tensors, fill
from draftree.drafting.published.layers import Head, Span, linear
from draftree.drafting.published.recursion import RecursiveDrafter
from draftree.errors import brief
from draftree.runner import Runner
from draftree.runner.target import Target, inspect_model

FAMILIES = (
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),  # mtp.*
    *("deepseek_v3", "glm4_moe", "glm4_moe_lite"),  # model.layers.N.*, N the number of the target's layers
)
# The names of files, in the layouts of Qwen, of DeepSeek and of speculators; others belong to the decoder layer.
PARTS = {
    **dict.fromkeys(("pre_fc_norm_embedding", "enorm", "token_layernorm"), "enorm"),
    **dict.fromkeys(("pre_fc_norm_hidden", "hnorm", "hidden_layernorm"), "hnorm"),
    **dict.fromkeys(("fc", "eh_proj", "input_proj"), "eh_proj"),
    **dict.fromkeys(("norm", "shared_head.norm", "final_layernorm"), "norm"),
}
FP8_BLOCK = 128  # Rows and columns with one scale in checkpoints of DeepSeek and Qwen.
SHARED = ("embed_tokens", "shared_head.head")  # Copies of the target's tables, as in Hugging Face's loader.


class MTPHead(Head):
    """The weights of a head, and its pass.

    Args:
        target: whose last layer with attention shows the kind of the head's layer.
    """

    def __init__(self, target: Target) -> None:
        config, width, decoder = target.config, target.hidden_size, target.decoder
        super().__init__(width, target.vocab_size, target.vocab_size, ())
        self.cache_argument = target.cache_argument
        number = max(i for i, layer in enumerate(target.layers) if hasattr(layer, "self_attn"))
        with torch.device("meta"):
            self.eh_proj = linear(2 * width, width)
            norm = type(decoder.norm)
            self.enorm, self.hnorm, self.norm = (norm(width, eps=config.rms_norm_eps) for _ in range(3))
            layer: Any = type(target.layers[number])
            self.layer = layer(config, number)
        with torch.device("cpu"):
            self.rope = type(decoder.rotary_emb)(config)

    def forward(self, embeddings: Tensor, features: Tensor, positions: Tensor, spans: Sequence[Span]) -> Tensor:
        """Pass rows through the layer, as `EagleHead` does; features are what the target's last norm returns."""
        x = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(features)], -1))[None]
        angles = self.rope(x, positions[None])
        parts = (part.split([span.count for span in spans], 1) for part in (x, positions[None], *angles))
        made = [
            self.layer(
                rows,
                attention_mask=_additive(span.sees, x.dtype),
                position_ids=places,
                position_embeddings=turns,
                **{self.cache_argument: _Rows(span)},
            )[0]
            for span, rows, places, *turns in zip(spans, *parts, strict=True)
        ]
        return torch.cat(made)

    def fed_back(self, out: Tensor) -> Tensor:
        """Return the features of the next depth, from an output."""
        normed: Tensor = self.norm(out)
        return normed

    head_input = fed_back


class _Rows:
    """The cache that a stock layer is given: the states of one request."""

    def __init__(self, span: Span) -> None:
        self.span = span

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write rows [1, heads, n, dim]; return all up to them, [1, heads, K, dim]."""
        states, start = self.span.states, self.span.start
        states.put(0, start, keys[0].transpose(0, 1), values[0].transpose(0, 1))
        end = start + self.span.count
        return states.keys[0].upto(end).transpose(0, 1)[None], states.values[0].upto(end).transpose(0, 1)[None]


def _additive(sees: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the mask [1, 1, n, K] that stock attention adds to its scores."""
    if sees is None:
        return None
    mask = torch.zeros(sees.shape, dtype=dtype, device=sees.device)
    return mask.masked_fill(~sees, torch.finfo(dtype).min)[None, None]


class MTP(RecursiveDrafter):
    """Drafts with the MTP head of the target's own checkpoint; made by `draftree.load_drafter("mtp", model)`.

    Args:
        head: its weights.
        target: the model.
    """

    name = "mtp"
    kind = "MTP"

    def __init__(self, head: MTPHead, target: Target) -> None:
        layers = len(target.layers)
        super().__init__(head, Sizes(target.hidden_size, layers, target.vocab_size), (layers,), None)

    @classmethod
    def load(cls, folder: Path, target: Target) -> MTP:
        """Read the head in the target's folder, or one of speculators in a folder of its own.

        Raises:
            ValueError: a family whose heads draftree does not know, no head in the folder, or one that does not fit.
        """
        if target.model_type not in FAMILIES:
            raise ValueError(
                f"draftree runs no MTP heads of '{target.model_type}' models, but those of {', '.join(FAMILIES)}: use "
                "lookahead, or a published drafter of this model."
            )
        tensors = read_head(folder, len(target.layers))
        if not tensors:
            raise ValueError(
                f"There is no MTP head among the tensors in {str(folder)!r}, and Hugging Face's save_pretrained drops "
                "it: load the model from its first checkpoint, or use lookahead."
            )
        head = MTPHead(target)
        fill(head, tensors, folder)
        return cls(head, target)

    def features_of(self, taps: Sequence[Tensor], runner: Runner) -> Tensor:
        return runner.close(taps[0].to(runner.target.dtype)[None])[0].to(taps[0].dtype)


def load_mtp(model: Any) -> MTP:
    """Return the MTP head of the checkpoint that `model` was loaded from, bound to it.

    Raises:
        ValueError: that folder is not known, or see `MTP.load`.
    """
    target = inspect_model(model)
    config, name = target.model.config, str(target.model.name_or_path)
    folder = Path(name)
    with suppress(HFValidationError):  # a path
        cached = try_to_load_from_cache(name, "config.json", revision=getattr(config, "_commit_hash", None))
        folder = Path(cached).parent if isinstance(cached, str) else folder
    if not name or not folder.is_dir():
        raise ValueError(
            f"The model names no checkpoint folder that its MTP head could be read from, but {brief(repr(name))}: load "
            "it from a folder of safetensors files, or by its hub name."
        )
    drafter = MTP.load(folder, target)
    drafter.bind(target)
    return drafter


def read_head(folder: Path, layers: int) -> Tensors:
    """Return the tensors of a head by the names of `MTPHead`; none where the folder has no head.

    Args:
        folder: of safetensors files, of which only the head's tensors are read.
        layers: of the target. Of several MTP layers the first is read.

    Raises:
        ValueError: a broken file.
    """
    beginning = rf"(?:mtp|mtp_layers\.0|(?:model\.)?(?:language_model\.)?layers\.{layers})\."
    place = re.compile(beginning + r"(?:layers\.0\.)?((?!layers\.).+)\.(\w+)")
    found: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as opened:
                for match in filter(None, map(place.fullmatch, opened.keys())):
                    if match[1] not in SHARED:
                        own = PARTS.get(match[1], f"layer.{match[1]}")
                        found[f"{own}.{match[2]}"] = opened.get_tensor(match[0])
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{str(file)!r} is broken: fetch the checkpoint anew ({brief(error)}).") from None
    for name in [name.removesuffix("_scale_inv") for name in found if name.endswith("_scale_inv")]:
        if name in found:  # FP8, with a scale for each block
            weight, scales = found[name].float(), found.pop(f"{name}_scale_inv")
            scales = scales.float().repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
            found[name] = weight * scales[: len(weight), : weight.shape[1]]
    # Experts stand one by one in files, and are one tensor in Hugging Face's layers.
    base = "layer.mlp.experts"
    count = sum(re.fullmatch(rf"{base}\.\d+\.down_proj\.weight", name) is not None for name in found)
    parts = [[f"{base}.{i}.{part}_proj.weight" for i in range(count)] for part in ("gate", "up", "down")]
    if count and found.keys() >= {name for names in parts for name in names}:
        gate, up, down = (torch.stack([found.pop(name) for name in names]) for names in parts)
        found |= {f"{base}.gate_up_proj": torch.cat([gate, up], 1), f"{base}.down_proj": down}
    return found
