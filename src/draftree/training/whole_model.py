"""Objectives that train a whole model by its own forward pass, on answers that a model has given.

Unlike the objectives of drafters these drive no runner: the model is a stock one, and what comes out is a stock model
again. `draftree train align` trains with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from draftree.errors import brief
from draftree.files import replacing_files
from draftree.runner.target import inspect_model
from draftree.runner.weights.packed import packed
from draftree.runner.weights.stock import has_eight_bits
from draftree.training.objective import Objective, cross_entropy
from draftree.training.rows import Batch


class AlignObjective(Objective):
    """Cross entropy of a small model with every token that the large one wrote, its end token included (BiLD, 3.5).

    Split points are for drafters and are not looked at.

    Args:
        model: a stock Hugging Face causal language model, or an encoder-decoder; all of it is trained.
    """

    places: tuple[int, ...] = (1,)

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def measure(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """See `Objective.measure`; logits are [B, T - 1, V]."""
        if batch.source is None or batch.source_length is None:
            logits = self.model(input_ids=batch.tokens, attention_mask=_upto(batch.length, batch.tokens)).logits
        else:
            read = _upto(batch.source_length, batch.source)
            logits = self.model(input_ids=batch.source, attention_mask=read, decoder_input_ids=batch.tokens).logits
        return cross_entropy(logits[:, :-1], *_answers_in(batch)), [logits[:, :-1]]

    def truths(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        return [_answers_in(batch)] * len(self.places)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Every tensor for itself: files of checkpoints cannot hold one that has two names, as tied embeddings do."""
        held: dict[str, Any] = super().state_dict(*args, **kwargs)
        seen: set[int] = set()
        for name, tensor in held.items():
            if tensor.data_ptr() in seen:
                held[name] = tensor.clone()
            seen.add(tensor.data_ptr())
        return held


def check_trainable(model: Any) -> None:
    """Refuse a model that would not be trained as a whole, or not saved as a stock one.

    Raises:
        ValueError: it is packed, quantised, frozen, or has an adapter or a generation config that cannot be saved.
    """
    model = inspect_model(model).model
    if packed(model):
        raise ValueError("The model is packed and cannot be trained so: call draftree.unpack_weights(model) before.")
    if getattr(model, "hf_quantizer", None) is not None or has_eight_bits(model):
        raise ValueError("The model's weights are quantised and cannot be trained: load it without quantisation.")
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        raise ValueError(
            "The model has an adapter, which a stock Hugging Face folder does not hold: train what the adapter's "
            "merge_and_unload() returns."
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("All weights of the model are frozen: call model.requires_grad_(True) before.")
    if model.generation_config is not None:
        with TemporaryDirectory() as folder:
            try:
                model.generation_config.save_pretrained(folder)
            except ValueError as error:
                raise ValueError(
                    "The model's generation_config has settings that Hugging Face does not save, so the trained model "
                    f"could not be saved either: set them right or to None ({brief(error)})."
                ) from error


@contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """The model's tensors in float32 meanwhile, as small steps are lost in half types; then as they lay before.

    Buffers come back themselves: rotary frequencies are float32 in a model of any type.
    """
    parameters = [(p, p.device, p.dtype) for p in model.parameters()]
    buffers = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    model.float()
    try:
        yield
    finally:
        for parameter, device, dtype in parameters:
            parameter.data = parameter.data.to(device, dtype)
        for held, before in buffers:
            held.update(before)


def save_model(model: Any, tokenizer: Any, out: Path) -> None:
    """A model as Hugging Face saves it, with its tokenizer if there is one."""
    out.mkdir(parents=True, exist_ok=True)
    with replacing_files(out) as temporary:
        model.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        written = {path.name for path in temporary.iterdir()}
    for path in out.glob("model*.safetensors*"):  # parts of a larger model before it would be read in place of this one
        if path.name not in written:
            path.unlink()


def _answers_in(batch: Batch) -> tuple[Tensor, Tensor]:
    """The token behind each place of a batch [B, T - 1] but the last, and where it is one of an answer."""
    place = torch.arange(batch.tokens.shape[1] - 1, device=batch.tokens.device)
    return batch.tokens[:, 1:], (place >= batch.start[:, None] - 1) & (place < batch.length[:, None] - 1)


def _upto(length: Tensor, of: Tensor) -> Tensor:
    return (torch.arange(of.shape[1], device=of.device) < length[:, None]).long()
