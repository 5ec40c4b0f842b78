"""Inflation: a model made larger without a change in what it says, so that a size's cost meets real text.

What a step costs depends on the sizes of a model, and what draft tokens are worth depends on its text. A small trained
model inside a large one gives both without a download. Its hidden states are the first entries of the large one's, the
others stay 0: every matrix that writes to them, and every one that reads heads, MLP units or layers which the small
model does not have, holds zeros there. The zeros are stored, read and multiplied as any weights are. What keeps the two
equal:

- Norms. A mean over D entries of which d are not 0 is d/D of the small one's: weights shrink by sqrt(d/D), epsilon by
  d/D.
- Heads. Scores are scaled by 1/sqrt(head width), so queries grow by what that shrinks. A pair of rotary entries goes to
  the pair that turns as fast; theta is chosen so that there is one.
- Layers. Layer i of l goes to layer floor(i L/l) of L, and those between add nothing: after T of L layers the states
  are those of the small model after the same share of its own. Drafters that join in mid-stack keep their place.
- Vocabulary. Tokens that the small model does not have must never win, and a head without bias can say "never" only to
  a constant. So one more entry of the hidden states is one: half of epsilon is given up for it.

- Recurrent layers. Keys are normed by a sum of squares, which zeros do not change. What a head reads shrinks by the
  root of the key's width before its norm, whose epsilon then shrinks as well. A model's norms share one epsilon, so the
  hidden states, and attention's queries and keys before their norms, are scaled to fit that one.

`inflate_drafter` takes what was trained for the small model along.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect
from dataclasses import asdict
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.inflate.places import Places
from benchmarks.inflate.sizes import Size, check_memory, parameters_named, size_for, size_named
from benchmarks.inflate.weights import Scales, inflated_weights
from draftree.drafting.folder import model_hash
from draftree.runner.target import Target, inspect_model

FAMILIES = ("llama", "mistral", "qwen2", "qwen3_5_text")


def inflate(
    model: Any,
    params: int | str | None = None,
    *,
    shape: str | Size | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    published: torch.dtype | None = None,
) -> Any:
    """Return a large model that says what `model` says (in fp32 the same greedy tokens; logits differ by rounding).

    Args:
        model: a llama, mistral, qwen2 or qwen3_5_text model without windows.
        params: about how many parameters, such as 400_000_000 or "400M"; see `benchmarks.inflate.sizes.size_for`.
        shape: instead of them, the name of a size in `benchmarks.inflate.sizes.SIZES`, or a size.
        dtype: of its weights; the model's own by default.
        device: where it is made; the model's own by default.
        published: a type to which its weights are rounded, as those of a checkpoint are that was published in it and is
            loaded in `dtype`: a few tokens may change then. None for no rounding.

    Returns:
        A model of the same class in evaluation mode. `config.inflated_from` holds the small model's size and hash.

    Raises:
        TypeError, ValueError: a model of another family, with windows or stretched rotary angles; a size that cannot
            hold it; more memory than is free.
    """
    if (params is None) == (shape is None):
        raise ValueError("Inflate to a number of parameters or to a shape: give one of them.")
    target = inspect_model(model)
    _check_family(target)
    model, small = target.model, Size.of(target.config)
    if shape is None:
        count = parameters_named(params) if isinstance(params, str) else int(params or 0)
        large = size_for(count, small)
    else:
        large = size_named(shape) if isinstance(shape, str) else shape
    places = Places(small, large, _turning(target.config))
    rope = target.config.rope_parameters
    if rope.get("rope_type", "default") != "default" and large.head_dim != small.head_dim:
        raise ValueError(
            f"This model stretches its rotary angles ({rope['rope_type']}), which fit one head width only: give a size "
            f"with head_dim {small.head_dim}."
        )
    dtype, device = dtype or target.dtype, torch.device(device or target.device)
    check_memory(large, dtype, device)
    c = torch.tensor(math.sqrt(small.hidden_size * target.config.rms_norm_eps / 2))
    c = c.to(published or dtype).to(dtype)  # as it will be stored
    config = _config(model, places, float(c) if places.constant is not None else 0.0)
    with torch.device("meta"):
        inflated = AutoModelForCausalLM.from_config(config, dtype=dtype)
    shapes = {name: tuple(p.shape) for name, p in inflated.named_parameters()}
    scales = Scales.of(target.config, config, places, float(c) if places.constant is not None else 0.0)
    made = dict(inflated_weights(model, shapes, places, scales, dtype, device, float(c)))
    if published is not None:
        for tensor in made.values():
            tensor.copy_(tensor.to(published))
    inflated.load_state_dict(made, assign=True)
    rotary = inflated.get_decoder().rotary_emb
    inflated.get_decoder().rotary_emb = type(rotary)(config).to(device)  # its angles were computed on no device
    inflated.generation_config = copy.deepcopy(model.generation_config)
    return inflated.eval()


def places_of(model: Any) -> Places:
    """Return the places of the small model in an inflated one; raise a ValueError for another model."""
    config = getattr(model, "config", None)
    small = getattr(config, "inflated_from", None)
    if small is None:
        raise ValueError("This model was not inflated: give the one that benchmarks.inflate.inflate returned.")
    numbers = {name: small[name] for name in Size.__slots__ if name in small}
    return Places(Size(**numbers), Size.of(config), _turning(config))


def _turning(config: Any) -> float:
    return float(config.rope_parameters.get("partial_rotary_factor", 1.0))


def _check_family(target: Target) -> None:
    name = target.model_type
    if name not in FAMILIES or target.encoder_decoder:
        raise ValueError(
            f"A '{name}' model cannot be inflated: give a {', '.join(FAMILIES[:-1])} or {FAMILIES[-1]} model."
        )
    if any(kind.window or kind.chunk for kind in target.kinds):
        raise ValueError(
            "A model with sliding windows cannot be inflated: give one whose layers all see the whole text."
        )
    if target.config.hidden_act != "silu":
        raise ValueError(f"An MLP with {target.config.hidden_act} cannot be inflated: give a model with silu.")


def _config(model: Any, places: Places, constant: float) -> Any:
    small, large = places.small, places.large
    config = copy.deepcopy(model.config)
    config.hidden_size, config.num_hidden_layers = large.hidden_size, large.layers
    config.num_attention_heads, config.num_key_value_heads = large.heads, large.kv_heads
    config.head_dim, config.intermediate_size = large.head_dim, large.intermediate_size
    config.vocab_size, config.tie_word_embeddings = large.vocab_size, False
    if small.recurrent:
        shrink = small.key_width * small.value_width / (large.key_width * large.value_width)
        config.rms_norm_eps *= shrink
        for name in ("key_heads", "value_heads"):
            setattr(config, f"linear_num_{name}", getattr(large, name))
        config.linear_key_head_dim, config.linear_value_head_dim = large.key_width, large.value_width
        config.linear_conv_kernel_dim = large.kernel
    else:
        config.rms_norm_eps = (small.hidden_size * config.rms_norm_eps - constant**2) / large.hidden_size
    theta = places.theta(config.rope_parameters["rope_theta"])
    config.rope_parameters = {**config.rope_parameters, "rope_theta": theta}
    if getattr(config, "layer_types", None) is not None:
        # Of each layer and of those that are idle behind it.
        ends = [places.layer(i + 1) for i in range(small.layers)]
        config.layer_types = [config.layer_types[bisect(ends, i)] for i in range(large.layers)]
    if Size.of(config).recurrent != large.recurrent:
        raise ValueError(
            f"recurrent is {large.recurrent}, and of {large.layers} layers it takes {Size.of(config).recurrent} to "
            "hold this model."
        )
    config.inflated_from = {**asdict(small), "hash": model_hash(model)}
    return config
