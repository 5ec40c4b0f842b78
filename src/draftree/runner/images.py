"""The images of a prompt: what a processor returns beside token ids, checked and cut by request.

A prompt with images is read alone and in one pass, by the model's own `forward`: it merges image features into the
embeddings, makes its own mask over them and its own rotary positions. Later passes need nothing of the images but the
distance between those positions and the tokens' numbers, which the Qwen-VL line calls `rope_deltas`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from draftree.errors import check_kind
from draftree.runner.target import Target, arguments_of

# Families whose prompts with images the test suite compares with Hugging Face's `generate`.
FAMILIES = frozenset(
    (
        "aya_vision", "cohere2_vision", "gemma3", "gemma4", "glm46v", "glm4v", "glm4v_moe", "idefics2", "idefics3",
        "internvl", "lfm2_vl", "llava", "llava_next", "llava_onevision", "mistral3", "paligemma", "qwen2_5_vl",
        "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "vipllava",
    )
)  # fmt: skip
BY_PROMPT = ("idefics2", "idefics3", "smolvlm")  # their tensors have a row for each prompt, others for each image
OF_IMAGES = ("pixel_", "image_", "spatial_shapes")  # how names of image tensors begin
OF_TOKENS = ("token_type_ids", "mm_token_type_ids")  # one number for each token of the prompt


@dataclass(frozen=True, slots=True, eq=False)
class Images:
    """The tensors of one prompt's images, by their name in the model's `forward`."""

    tensors: Mapping[str, Tensor]
    digest: str  # of the tensors; prompts of equal digests and tokens have equal keys and values
    encoded: Any = None  # the output of the model's encoder for `pixel_values`, where it is known

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Images:
        """Return the images that have these tensors."""
        made = hashlib.blake2b(digest_size=16)
        for name, tensor in sorted(tensors.items()):
            if name not in OF_TOKENS:  # They follow from the tokens.
                made.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
                made.update(tensor.contiguous().cpu().flatten().view(torch.uint8).numpy().data)
        return cls(dict(tensors), made.hexdigest())

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """Return what the model's `forward` gets."""
        given: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        if self.encoded is not None:
            del given["pixel_values"]
            given["mm_encoder_outputs"] = {"image": self.encoded}
        return given

    def with_encoded(self, output: Any, rows: slice) -> Images:
        """Return the same with the features of these placeholders, out of an encoder's output for a batch."""

        def cut(features: Any) -> Any:
            own = torch.cat([part.flatten(0, -2) for part in features])[rows]
            return own[None] if isinstance(features, Tensor) else [own]

        parts = {"pooler_output": cut(output.pooler_output)}
        if output.get("deepstack_features") is not None:
            parts["deepstack_features"] = [cut(layer) for layer in output.deepstack_features]
        return replace(self, encoded=type(output)(**parts))


def placeholder(target: Target) -> int | None:
    """Return the token that stands for a part of an image in a prompt; None for a model that reads text alone."""
    config = target.model.config
    names = ("image_token_id", "image_token_index")
    return next((int(token) for name in names if (token := getattr(config, name, None)) is not None), None)


def take_tensors(target: Target, given: dict[str, Any]) -> dict[str, Tensor]:
    """Remove and return a processor's image tensors from the options of a call; a ValueError if they do not fit."""
    known = arguments_of(type(target.model))
    seeing = placeholder(target) is not None  # In other models a type of 0 may have an effect.
    types = {name: given[name] for name in OF_TOKENS if seeing and isinstance(given.get(name), Tensor)}
    named = [name for name, value in given.items() if name.startswith(OF_IMAGES) and value is not None]
    for name in [*named, *types]:
        if "video" in name:
            raise ValueError(f"draftree reads text and images: leave {name!r} out, or use Hugging Face's own generate.")
    if not named:
        if all(not bool(tensor.any()) for tensor in types.values()):  # A prompt of text alone.
            for name in types:
                del given[name]
        return {}
    check_family(target)
    for name in named:
        if name not in known or not isinstance(given[name], Tensor):
            raise ValueError(f"{name!r} is no tensor that this model's forward takes: give what its processor returns.")
    return {name: given.pop(name) for name in [*named, *types]}


def images_of(target: Target, inputs: Mapping[str, Tensor] | Images | None) -> Images | None:
    """Return the images that a processor's tensors hold; its token ids and mask are left out."""
    if inputs is None or isinstance(inputs, Images):
        return inputs
    check_kind(Mapping, "a processor's tensors by name", inputs=inputs)
    given = {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
    tensors = take_tensors(target, given)
    if given:
        raise ValueError(f"inputs has {next(iter(given))!r}: give what the model's processor returns for images.")
    return Images.of(tensors) if tensors else None


def check_family(target: Target) -> None:
    """Raise where prompts for this model cannot hold images."""
    family = target.model.config.model_type
    if "pixel_values" not in arguments_of(type(target.model)) or placeholder(target) is None:
        raise ValueError(
            f"{type(target.model).__name__} reads text alone: leave images out, or load an image-and-text model by "
            "AutoModelForImageTextToText."
        )
    if family not in FAMILIES:
        raise ValueError(
            f"draftree does not read images for '{family}' models: leave images out, or use Hugging Face's own "
            "generate; docs/images.md lists the families."
        )


def check_images(target: Target, prompt: Sequence[int], images: Images | None) -> None:
    """Check that a prompt has placeholders where it has images, and none where it has not."""
    token = placeholder(target)
    held = 0 if token is None else list(prompt).count(token)
    if images is None:
        if target.both_ways:
            raise ValueError("PaliGemma takes images with each prompt: give all that its processor returns.")
        if held and target.model.config.model_type in FAMILIES:
            raise ValueError(
                f"The prompt has {held} image placeholder tokens (id {token}) and no images: give all that the "
                "processor returns, or leave the placeholders out."
            )
        return
    check_family(target)
    if "pixel_values" not in images.tensors:
        raise ValueError("The image tensors lack 'pixel_values': give all that the processor returns.")
    if not held:
        raise ValueError(
            f"The prompt has images and no image placeholder token (id {token}): write it with the processor's "
            "chat template, or with the image token in the text."
        )
    for name in OF_TOKENS:
        types = images.tensors.get(name)
        if types is not None and types.shape != (1, len(prompt)):
            raise ValueError(f"{name} has shape {tuple(types.shape)} and the prompt {len(prompt)} tokens: give [1, n].")
    if "image_grid_thw" in images.tensors:
        parts = sum(_parts(target, images.tensors, []))
        if parts != held:
            raise ValueError(
                f"The prompt has {held} image placeholder tokens, and its images have {parts}: give all of both, uncut."
            )
    if "mm_token_type_ids" in arguments_of(type(target.model)) and "mm_token_type_ids" not in images.tensors:
        raise ValueError("The image tensors lack 'mm_token_type_ids': give all that the processor returns.")


def _parts(target: Target, tensors: Mapping[str, Tensor], runs: list[int]) -> list[int]:
    """Return the number of placeholders of each image, given the lengths of all runs of them in the prompts."""
    config, grid = target.model.config, tensors.get("image_grid_thw")
    if grid is not None:
        return (grid.prod(-1) // config.vision_config.spatial_merge_size**2).tolist()
    if config.model_type == "mistral3":  # A token for the end of a line stands between an image's runs.
        return (
            (tensors["image_sizes"] // (config.vision_config.patch_size * config.spatial_merge_size)).prod(-1).tolist()
        )
    images = len(tensors["pixel_values"])
    return runs if len(runs) == images else [sum(runs) // images] * images


def split_images(
    target: Target, tensors: Mapping[str, Tensor], input_ids: Tensor, attention_mask: Tensor | None
) -> list[Images | None]:
    """Return the images of each prompt [batch, length] of a processor's `tensors`; None for prompts of text alone.

    Raises:
        ValueError: the images cannot be told apart by the prompts' placeholders.
    """
    count = len(input_ids)
    if not tensors:
        return [None] * count
    for name in OF_TOKENS:
        if name in tensors and tensors[name].shape != input_ids.shape:
            raise ValueError(f"{name} and input_ids differ in shape: give what one call of the processor returns.")
    real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    seen = (input_ids == placeholder(target)) & real
    held = seen.sum(1).tolist()
    cut = (lambda name, b: tensors[name]) if count == 1 else _cutter(target, tensors, seen)
    answers: list[Images | None] = []
    for b in range(count):
        own = {name: cut(name, b) for name in tensors if name not in OF_TOKENS}
        own |= {name: tensors[name][b][real[b].to(tensors[name].device)][None] for name in OF_TOKENS if name in tensors}
        answers.append(Images.of(own) if held[b] or not any(held) else None)
    return answers


def _cutter(target: Target, tensors: Mapping[str, Tensor], seen: Tensor) -> Callable[[str, int], Tensor]:
    """Return a function that cuts one prompt's part out of a tensor; `seen` is True for placeholders."""
    if target.model.config.model_type in BY_PROMPT:
        return lambda name, b: tensors[name][b : b + 1]
    runs = [len(list(run)) for row in seen.tolist() for shown, run in groupby(row) if shown]
    each, held, grid = _parts(target, tensors, runs), seen.sum(1).tolist(), tensors.get("image_grid_thw")
    images = len(each)
    rows = [1] * images if grid is None else grid.prod(-1).tolist()  # of `pixel_values`, by image
    ends = [0]  # the image with which each prompt's images end
    fits = any(held)
    for need in held:
        end, found = ends[-1], 0
        while found < need and end < images:
            found, end = found + each[end], end + 1
        fits = fits and found == need
        ends.append(end)
    if not fits or ends[-1] < images:
        raise ValueError(
            "The image placeholder tokens of the batch do not fit its images: give what one call of the processor "
            "returns, or one prompt at a time."
        )

    def cut(name: str, b: int) -> Tensor:
        begin, end = ends[b], ends[b + 1]
        if grid is not None and name == "pixel_values":
            begin, end = sum(rows[:begin]), sum(rows[:end])
        return tensors[name][begin:end]

    return cut


@contextmanager
def own_positions(model: Any) -> Iterator[Callable[[], int]]:
    """Leave the model's `rope_deltas` as they were; yield a function that returns those of the pass, 0 for none."""
    holders = [module for module in model.modules() if hasattr(module, "rope_deltas")]
    before = [module.rope_deltas for module in holders]

    def shift() -> int:
        deltas = [module.rope_deltas for module in holders if module.rope_deltas is not None]
        return int(deltas[0].flatten()[0]) if deltas else 0

    try:
        for module in holders:
            module.rope_deltas = None
        yield shift
    finally:
        for module, deltas in zip(holders, before, strict=True):
            module.rope_deltas = deltas
