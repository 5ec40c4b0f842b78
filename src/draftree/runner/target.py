"""Inspect a model: its decoder stack, sizes and limits; refuse models that cannot hold token trees."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftree.runner.positions import LayerKind
from draftree.runner.recurrent.families import FAMILIES, Recurrence, recurrence_of
from draftree.runner.weights.blocks import PackedEmbedding
from draftree.runner.weights.stock import alteration

KINDS = ("full_attention", "sliding_attention", "chunked_attention")
RECURRENT = ("linear", "conv", "mamba", "recurrent")  # in the names of layer types that keep a state
MASK_4D = ("sdpa", "eager")  # attention implementations that take an explicit 4D mask
# Families whose `sliding_window` holds for every layer, whatever layer types their configuration names.
UNIFORM_WINDOW = (
    *("mistral", "mixtral", "ministral3", "starcoder2", "phi3", "phi4_multimodal", "phimoe"),
    *("doge", "qwen3_moe"),
)

# What `forward` calls its KV cache: in transformers from 5.24 on, and before it or in code that comes with weights.
CACHES = ("cache", "past_key_values")

# Attributes of modules that name a rate of dropout or noise applied in training mode.
NOISE = (
    *("dropout", "attention_dropout", "attn_dropout", "activation_dropout", "hidden_dropout", "residual_dropout"),
    *("embedding_dropout", "router_jitter_noise", "jitter_noise", "input_jitter_noise", "moe_jitter_eps", "layerdrop"),
)


@dataclass(frozen=True, slots=True)
class Target:
    """A model under draftree, checked once."""

    reference: weakref.ref[Any]  # weak, so that a runner kept for later calls does not keep the model alive
    layers: list[nn.Module]  # the decoder layers
    config: Any  # the decoder's text config
    kinds: tuple[LayerKind, ...]  # how far each layer looks
    vocab_size: int  # number of logits per row
    hidden_size: int  # width of the hidden states
    max_positions: int | None  # context limit in tokens, None where the model has none
    encoder_decoder: bool  # whether trees grow in the decoder of an encoder-decoder
    alteration: str | None  # a difference from its class, see `stock.alteration`; None for a stock model
    cache_argument: str  # name of the KV cache among the arguments of its `forward`
    recurrence: Recurrence | None = None  # how its recurrent layers are driven; None without any

    @property
    def model(self) -> Any:
        """The Hugging Face model as the user gave it."""
        model = self.reference()
        if model is None:
            raise RuntimeError("The model was deleted while draftree still drives it: keep a reference to it.")
        return model

    @property
    def decoder(self) -> Any:
        """The module that holds the decoder layers."""
        return self.model.get_decoder()

    @property
    def model_type(self) -> str:
        """Hugging Face's name of the family."""
        return str(self.config.model_type)

    @property
    def device(self) -> torch.device:
        """The device of the input ids."""
        return device_of(self.model)

    @property
    def both_ways(self) -> bool:
        """Whether a prompt's tokens see later ones of it, so that its beginning has no keys and values of its own."""
        return bool(self.model.config.model_type == "paligemma")

    def refuse_training(self) -> None:
        """Raise where the model is in a training mode that makes passes differ from each other.

        Plain training mode changes nothing in models without dropout, and is left alone as Hugging Face's
        `generate` leaves it.
        """
        for module in self.model.modules():
            if not module.training:
                continue
            if getattr(module, "gradient_checkpointing", False):
                raise ValueError(
                    "The model is training with gradient checkpointing, which drops the cache: call "
                    "model.eval() before generating."
                )
            rates = [module.p] if isinstance(module, nn.Dropout) else [getattr(module, n, 0) for n in NOISE]
            if any(isinstance(rate, float) and rate > 0 for rate in rates):
                raise ValueError(
                    "The model is in training mode and uses dropout, so no two passes agree: call "
                    "model.eval() before generating."
                )

    @property
    def dtype(self) -> torch.dtype:
        """Floating type of the weights."""
        dtype = self.model.dtype
        assert isinstance(dtype, torch.dtype)
        return dtype


def inspect_model(model: Any) -> Target:
    """Check that `model` can hold token trees and collect what the runners need.

    Raises:
        TypeError: not a Hugging Face model with a decoder and a language-model head.
        ValueError: a model that cannot hold trees, or not in its present state; the message says what to do.
    """
    model = unwrapped(model)
    needed = ("config", "get_decoder", "can_generate")
    known = isinstance(model, nn.Module) and all(hasattr(model, name) for name in needed)
    if not known:
        raise TypeError(
            f"draftree drives Hugging Face models, not {type(model).__name__}: "
            "pass what draftree.load_model, or AutoModelForCausalLM.from_pretrained, returns."
        )
    head = model.get_output_embeddings()
    if head is None or not model.can_generate():
        raise TypeError(
            f"{type(model).__name__} has no head that writes text: load it with draftree.load_model, or with "
            "AutoModelForCausalLM, AutoModelForSeq2SeqLM or AutoModelForImageTextToText."
        )
    config = model.config.get_text_config(decoder=True)
    reason = _without_trees(model, config)
    if reason is not None:
        raise ValueError(reason)
    encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", False))
    layers = _layers(model.get_decoder(), model.config if encoder_decoder else config)
    return Target(
        reference=weakref.ref(model),
        layers=layers,
        config=config,
        kinds=tuple(_kind(config, i) for i in range(len(layers))),
        vocab_size=int(getattr(head, "out_features", 0) or _table_of(head, config.vocab_size)[0]),
        hidden_size=int(_table_of(model.get_input_embeddings(), 0, config.hidden_size)[-1]),
        max_positions=_max_positions(config),
        encoder_decoder=encoder_decoder,
        alteration=alteration(model),
        cache_argument=next((name for name in arguments_of(type(model)) if name in CACHES), CACHES[1]),
        recurrence=recurrence_of(model, config),
    )


def _without_trees(model: Any, config: Any) -> str | None:
    """Return in one sentence why a model cannot hold trees, or not in its present state; None where it can."""
    name, attention = config.model_type, getattr(config, "_attn_implementation", "eager")
    if any(p.is_meta and _brought_to(m) is None for m in model.modules() for p in m.parameters(recurse=False)):
        return (
            "The model is on the meta device and has no weights: load them (from_pretrained without "
            "device_map='meta') before generating."
        )
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - set(KINDS))
    recurrent = getattr(model, "_is_stateful", False) or any(word in kind for kind in unknown for word in RECURRENT)
    if recurrent and name not in FAMILIES:
        return (
            f"'{name}' models carry a recurrent state of a kind that draftree cannot branch into a tree: use Hugging "
            "Face's own generate; docs/hybrid.md lists the families that it can."
        )
    if unknown and not recurrent:
        return (
            f"'{name}' has layers of type '{unknown[0]}', whose mask draftree does not know: use Hugging "
            "Face's own generate, and please report this architecture."
        )
    if any("quantized.dynamic" in type(m).__module__ for m in model.modules()):
        return (
            "The model rounds activations by one scale for all rows of a pass, so a row's output depends on its "
            "neighbours and no draft can be lossless: use weight-only quantisation."
        )
    if attention not in MASK_4D:
        return (
            f"Attention implementation '{attention}' takes no tree mask: load the model with "
            "attn_implementation='sdpa' (or 'eager')."
        )
    both_ways = getattr(config, "use_bidirectional_attention", False)
    if both_ways and name in ("gemma", "gemma2") and attention == "sdpa" and model.config.model_type != "paligemma":
        return (
            f"This '{name}' model reads its prompts both ways under sdpa (use_bidirectional_attention), which trees do "
            "not: load it with attn_implementation='eager', which reads them one way, or use Hugging Face's generate."
        )
    if (both_ways and name == "gemma3_text") or getattr(config, "is_causal", True) is False:
        return f"This '{name}' model reads its prompts both ways, which trees do not: use Hugging Face's generate."
    return None


def arguments_of(kind: Any) -> list[str]:
    """Return the argument names of a class's `forward`, then those of the classes to which it passes others."""
    names: list[str] = []
    for part in kind.__mro__:
        if "forward" in vars(part):
            parameters = inspect.signature(part.forward).parameters
            names += parameters
            if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
                break
    return names


def unwrapped(model: Any) -> Any:
    """Return the model inside a torch.compile or PEFT wrapper, whose own `forward` hides the arguments."""
    model = getattr(model, "_orig_mod", model)
    if not hasattr(model, "peft_config"):
        return model
    for adapter in model.peft_config.values():
        if getattr(adapter, "is_prompt_learning", False):
            raise ValueError(
                f"A {adapter.peft_type} adapter feeds virtual tokens around the model, which draftree does "
                "not see: use an adapter that changes weights, such as LoRA."
            )
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def device_of(model: Any) -> torch.device:
    """Return the device of a model's input ids."""
    embedding = model.get_input_embeddings()
    if isinstance(embedding, PackedEmbedding):
        return embedding.packed.device
    device = torch.device(getattr(embedding, "weight", next(model.parameters())).device)
    return torch.device(_brought_to(embedding) or device) if device.type == "meta" else device


def _table_of(module: Any, *sizes: int) -> Sequence[int]:
    """Return the shape of a module's weight; `sizes` of one that is made of several, such as a factorised one."""
    if isinstance(module, PackedEmbedding):
        return module.num_embeddings, module.embedding_dim
    weight = getattr(module, "weight", None)
    return sizes if weight is None else weight.shape


def rows_of(model: Any) -> int:
    """Return the number of token ids that a model, or its encoder, can read."""
    return _table_of(model.get_input_embeddings(), model.config.get_text_config().vocab_size)[0]


def offloaded(model: nn.Module) -> bool:
    """Return whether accelerate moves a model's weights or states in each call; a pass may then take minutes."""
    return any("_hf_hook" in module.__dict__ for module in model.modules())


def weight_of(module: Any) -> Tensor:
    """Return a module's weight, also if accelerate has offloaded it."""
    weight: Tensor = module.weight.detach()
    return module._hf_hook.weights_map["weight"] if weight.is_meta else weight


def _brought_to(module: nn.Module) -> Any:
    """Return the device to which accelerate brings an offloaded module's weights for a call; None for others."""
    hook: Any = getattr(module, "_hf_hook", None)
    for part in getattr(hook, "hooks", (hook,)):
        if getattr(part, "offload", False):
            return part.execution_device
    return None


def _layers(decoder: nn.Module, config: Any) -> list[nn.Module]:
    expected = getattr(config, "num_hidden_layers", "its")
    if getattr(config, "is_encoder_decoder", False):
        expected = getattr(config, "num_decoder_layers", None) or getattr(config, "decoder_layers", expected)
    for _, module in decoder.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == expected:
            return list(module)
    raise ValueError(
        f"Found no list of {expected} decoder layers in {type(decoder).__name__}: set config.num_hidden_layers if you "
        "have changed the number of layers; else this architecture is not supported, and please report it."
    )


def _kind(config: Any, index: int) -> LayerKind:
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if config.model_type in UNIFORM_WINDOW:
        name = "sliding_attention" if window else "full_attention"
    elif types is not None:
        name = types[index]
    elif config.model_type == "gpt_neo":
        name = "sliding_attention" if config.attention_layers[index] == "local" else "full_attention"
        window = config.window_size
    else:
        name = "full_attention"
    if name == "sliding_attention" and window:
        return LayerKind(name, window=int(window))
    if name == "chunked_attention":
        return LayerKind(name, chunk=int(config.attention_chunk_size))
    return LayerKind(name)


def _max_positions(config: Any) -> int | None:
    if config.model_type in ("bloom", "t5", "mt5", "umt5", "xglm", "m2m_100") or getattr(config, "alibi", False):
        return None  # relative, alibi or generated positions
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):  # of all layers, or by kind of layer
        if isinstance(parameters, dict) and parameters.get("rope_type") == "dynamic":
            return int(config.max_position_embeddings * parameters["factor"])  # the config has the length before
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None
