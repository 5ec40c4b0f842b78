"""Make untrained EAGLE-3 and DFlash heads with the sizes of their model, and save them in the layout of speculators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from draftree.drafting.folder import Base, fetched
from draftree.drafting.published.block import BlockHead, BlockLayout
from draftree.drafting.published.eagle import Eagle3, EagleHead, EagleLayout
from draftree.errors import check_least
from draftree.files import write_json
from draftree.published import kind_of
from draftree.runner.target import Target, inspect_model
from draftree.training.rows import Data

SPECULATORS = "0.9.0"  # The release whose layout is written.


class Speculator:
    """A head in training, saved in the layout of speculators.

    Args:
        model: that it drafts for.
        kind: its own entries of config.json.
        layer: class of its layers' configuration, and their number.
        settings: depth, the tokens of a draft, and draft_vocab, at most the model's vocabulary.

    Attributes:
        config: what config.json will have.
        weights: the head, by the names of the files.
        vocabulary: LongTensor [Vd], the target's token id of each draft id, ascending; empty until it is chosen.
        base, recipe: see `Trained`.

    Raises:
        ValueError: a model with an encoder or with narrow embeddings, or a setting out of range.
    """

    base: Base | None = None
    recipe: dict[str, Any] | None = None

    def __init__(self, model: Any, kind: dict[str, Any], layer: tuple[Any, int], settings: dict[str, int]) -> None:
        target = inspect_model(model)
        wide = target.model.get_input_embeddings().weight.shape[-1] == target.hidden_size
        if target.encoder_decoder or not wide or not _number(target.config, "num_attention_heads"):
            raise ValueError(
                "EAGLE-3 and DFlash heads are trained for decoder-only models with attention, and embeddings as wide "
                f"as their hidden states, and this '{target.model_type}' model is none: train Medusa instead."
            )
        check_least(1, depth=settings["depth"], layers=layer[1])
        check_least(2, 2**31, draft_vocab=settings["draft_vocab"])
        size, count = min(settings["draft_vocab"], target.vocab_size), len(target.layers)
        self.settings = settings | {"draft_vocab": size}
        self.vocabulary = torch.empty(0, dtype=torch.long, device="cpu")
        few = min(1, count), count // 2, max(count - 1, 1)
        self.taps: tuple[int, ...] = (2, count // 2, count - 3) if count > 6 else few
        self.config = kind | {
            "speculators_version": SPECULATORS,
            "draft_vocab_size": size,
            "target_hidden_size": target.hidden_size,
            "tie_word_embeddings": False,
            "transformer_layer_config": layer_config(target, *layer).to_diff_dict() | {"vocab_size": target.vocab_size},
        }
        self.architectures = [type(target.model).__name__]
        self.embeddings = target.model.get_input_embeddings().weight if settings.get("embeddings") else None
        block = kind["speculators_model_type"] == "dflash"
        self.config["aux_hidden_state_layer_ids" if block else "eagle_aux_hidden_state_layer_ids"] = list(self.taps)
        own = [] if block and size == target.vocab_size else ["lm_head"]
        if block:
            self.weights: Any = BlockHead(BlockLayout.of(Path(), self.config, count), own)
        else:
            self.weights = EagleHead(EagleLayout.of(Path(), self.config), len(self.taps), own)
        begin(self.weights)

    def go_on_from(self, source: str | Path, model: Any) -> None:
        """Begin with a trained EAGLE-3 head of any layout, see `eagle3`: with its sizes, draft vocabulary and weights.

        Raises:
            ValueError: another kind of drafter, one for another model, of several layers, or whose last linear reads
                what is not normed, which speculators' layout cannot hold.
        """
        folder = fetched(source)
        if kind_of(folder) != "EAGLE-3":
            raise ValueError(f"{str(folder)!r} holds no EAGLE-3 head, and training goes on from no other drafter.")
        target = inspect_model(model)
        drafter = Eagle3.load(folder, len(target.layers))
        layout, held = drafter.head.layout, {name: t.float() for name, t in drafter.head.state_dict().items()}
        drafter.bind(target)
        if not layout.norm_before_head or len(drafter.head.layers) > 1:
            has = "several layers" if layout.norm_before_head else "a last linear that reads what is not normed"
            raise ValueError(f"The head in {str(folder)!r} has {has}, which is not trained here: train a new one.")
        size, self.taps = layout.draft_vocab_size, drafter.taps
        known = drafter.vocabulary
        self.vocabulary = torch.arange(size, device="cpu") if known is None else torch.from_numpy(known)
        self.settings = self.settings | {"draft_vocab": size}
        self.config |= {
            "draft_vocab_size": size,
            "transformer_layer_config": layout.config.to_diff_dict() | {"vocab_size": layout.vocab_size},
            "eagle_aux_hidden_state_layer_ids": list(self.taps),
            "norm_before_residual": layout.norm_before_residual,
            "norm_before_fc": layout.norm_before_fc,
            "fc_norm": layout.fc_norm,
            "norm_output": layout.norm_fed_back,
        }
        own = [name for name in ("embed_tokens", "lm_head") if f"{name}.weight" in held]
        self.weights = EagleHead(layout, len(self.taps), own)
        self.weights.load_state_dict(held, assign=True)
        if self.weights.embed_tokens is not None:
            self.weights.embed_tokens.requires_grad_(False)

    def choose(self, data: Data, table: Tensor | None) -> None:
        """Choose the draft vocabulary by the data, and begin with these rows of the model's output embedding."""
        if len(self.vocabulary):
            return  # A trained head has one.
        size = self.weights.layout.vocab_size
        answers, others = (torch.zeros(size, dtype=torch.long, device="cpu") for _ in range(2))
        for row in data.train:
            tokens = torch.tensor(row.tokens, dtype=torch.long, device="cpu")
            others += torch.bincount(tokens[: row.start], minlength=size)
            answers += torch.bincount(tokens[row.start :], minlength=size)
        order = (answers * (int(others.max()) + 1) + others).argsort(descending=True, stable=True)
        self.vocabulary = order[: self.settings["draft_vocab"]].sort().values
        if "block_size" in self.config:
            self.config["mask_token_id"] = int(order[-1])  # The rarest token.
        own = self.weights.lm_head
        if own is not None and table is not None and table.shape[-1] == own.in_features:
            own.weight.data.copy_(table.detach()[self.vocabulary.to(table.device)])

    def save_pretrained(self, folder: Path, *, dtype: torch.dtype | None = None) -> None:
        """Write config.json and model.safetensors, in 16 bits by default."""
        assert self.base is not None
        held, size = self.weights.state_dict(), self.weights.layout.vocab_size
        tensors = {name: held[name].detach().cpu().contiguous().to(dtype or torch.float16) for name in held}
        if len(self.vocabulary) < size:
            known = torch.zeros(size, dtype=torch.bool, device="cpu")
            known[self.vocabulary] = True
            tensors |= {"d2t": self.vocabulary - torch.arange(len(self.vocabulary), device="cpu"), "t2d": known}
        if self.embeddings is not None:
            tensors.setdefault("embed_tokens.weight", self.embeddings.detach().cpu().to(dtype or torch.float16))
        proposal = {"proposal_type": "greedy", "speculative_tokens": self.settings["depth"]}
        verifier = {
            "algorithm": self.config["speculators_model_type"],
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal | {"accept_tolerance": 0.0, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": self.base.name, "architectures": self.architectures},
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").write_bytes(save(tensors, {"format": "pt"}))
        write_json(folder / "config.json", self.config | {"speculators_config": verifier})


def eagle3(
    model: Any, *, depth: int = 4, draft_vocab: int = 8192, embeddings: bool = False, source: str | Path | None = None
) -> Speculator:
    """Return an EAGLE-3 head of one layer, or a trained one to go on from; it learns to draft `depth` tokens in turn.

    With `embeddings`, its file holds a copy of the model's, which speculators' own loader needs. `source` is the folder
    or hub name of a trained head, whose layers and draft vocabulary stay.
    """
    kind = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": True,
        "norm_output": False,
        "embed_requires_grad": False,
    }
    settings = {"depth": depth, "draft_vocab": draft_vocab, "embeddings": embeddings}
    made = Speculator(model, kind, (LlamaConfig, 1), settings)
    if source is not None:
        made.go_on_from(source, model)
    return made


def dflash(model: Any, *, depth: int = 7, draft_vocab: int = 8192, layers: int = 2) -> Speculator:
    """Return an untrained DFlash head; a block drafts `depth` tokens."""
    kind = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "block_size": depth + 1,
        "mask_token_id": 0,
    }
    settings = {"depth": depth, "draft_vocab": draft_vocab, "layers": layers}
    return Speculator(model, kind, (Qwen3Config, layers), settings)


def layer_config(target: Target, kind: Any, layers: int) -> Any:
    """Return the configuration of a head's decoder layers, with the sizes of the target's."""
    own = target.config
    heads = int(own.num_attention_heads)
    base = (getattr(own, "rope_parameters", None) or {}).get("rope_theta", 10_000.0)
    return kind(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=_number(own, "intermediate_size") or 4 * target.hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=_number(own, "num_key_value_heads") or heads,
        head_dim=_number(own, "head_dim") or target.hidden_size // heads,
        max_position_embeddings=target.max_positions or 32_768,
        rope_parameters={"rope_type": "default", "rope_theta": base},
    )


def _number(config: Any, name: str) -> int | None:
    """Return a number of a configuration, or None. (Gemma 4's attribute raises where layers differ.)"""
    held = config.to_dict().get(config.attribute_map.get(name, name))
    return held if isinstance(held, int) else None


def begin(head: Any) -> None:
    """Give a head its first weights.

    Matrices are normal and norms are ones, but the last tapped state passes through the fusion as it is: it is close to
    what the output embedding reads. The last norm is small, so that the first logits are moderate.
    """
    tensors = {name: torch.ones(t.shape, dtype=torch.float32, device="cpu") for name, t in head.state_dict().items()}
    for tensor in tensors.values():
        if tensor.dim() > 1:
            tensor.normal_(0, 0.02)
    tensors["norm.weight"] *= 0.5
    fusion = tensors["fc.weight"]
    fusion *= 0.25
    fusion[:, -len(fusion) :] = torch.eye(len(fusion), dtype=torch.float32, device="cpu")
    head.load_state_dict(tensors, assign=True)
