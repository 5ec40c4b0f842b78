"""The configuration and the stop tokens that a GGUF file describes.

transformers' own reading of a file leaves out what its table of names lacks: how rotary positions are scaled, and the
tokens that end a turn. Llama 3.1, Phi-3 of 128k and Gemma 3 of 4B and more were trained with scaled positions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from draftree.gguf.reader import GgufFile

# By GGUF's name of an architecture, transformers' name of the model: those with layers that the `cpu` runner has.
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
LLAMA3, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = frozenset((LLAMA3, LONG, SHORT))
ORIGINAL = "rope.scaling.original_context_length"
# Layers of the models of 27B, which scale queries by the size of a head as if all heads made up the hidden size.
OF_27B = {"gemma2": 46, "gemma3": 62}
TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
CONTROL = 3  # among the types of tokens


def config_of(file: GgufFile) -> Any:
    """Return the configuration of transformers that a file describes.

    Raises:
        ValueError: entries that no configuration can have, or positions that are scaled in an unknown way.
    """
    from transformers import AutoConfig
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    metadata = file.metadata
    architecture = metadata["general.architecture"]
    name = ARCHITECTURES[architecture]
    known = "mistral" if architecture == "llama" and metadata.get("general.name") == "mistral" else architecture
    found: dict[str, Any] = {"tie_word_embeddings": "output.weight" not in file.tensors}
    renamed: dict[str, Any] = {"general": GGUF_CONFIG_MAPPING["general"], "tokenizer": GGUF_CONFIG_MAPPING["tokenizer"]}
    renamed[architecture] = GGUF_CONFIG_MAPPING[known]
    for key, value in metadata.items():
        group, _, rest = key.partition(".")
        setting = renamed.get(group, {}).get(rest)
        if setting is not None and setting != -1:
            found[setting] = value
    found.setdefault("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())))
    found["model_type"] = "mistral" if known == "mistral" else name
    if architecture == "qwen3" and "qwen3.attention.key_length" in metadata:
        found["head_dim"] = metadata["qwen3.attention.key_length"]
    if architecture == "phi3":
        for setting, key in (
            ("sliding_window", "attention.sliding_window"),
            ("original_max_position_embeddings", ORIGINAL),
        ):
            found |= {setting: metadata[f"phi3.{key}"]} if metadata.get(f"phi3.{key}") else {}
    if OF_27B.get(architecture) == found.get("num_hidden_layers"):
        found["query_pre_attn_scalar"] = found["hidden_size"] // found["num_attention_heads"]
    config = AutoConfig.for_model(**found)
    _check_sizes(file, config)
    rope = _rope(file, architecture, config)
    if rope is None:
        return config
    config = AutoConfig.for_model(**found | {"rope_parameters": rope})
    if LLAMA3 in file.tensors:
        _check_llama3(file, config)
    return config


def stop_tokens(metadata: dict[str, Any]) -> list[int]:
    """Return the tokens that end an answer: the end of a text, and the end of a turn by its id or its usual name."""
    given = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, types = (metadata.get(f"tokenizer.ggml.{name}", []) for name in ("tokens", "token_type"))
    named = (
        i for i, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind == CONTROL and token in TURN_ENDS
    )
    return sorted({*named, *(token for token in given if token is not None)})


def _rope(file: GgufFile, architecture: str, config: Any) -> dict[str, Any] | None:
    """Return how positions are scaled; None if they are not."""
    about = {key.removeprefix(f"{architecture}.rope."): value for key, value in file.metadata.items()}
    kind, factor = about.get("scaling.type"), about.get("scaling.factor")
    original = about.get(ORIGINAL.removeprefix("rope."))
    own = config.rope_parameters
    if LLAMA3 in file.tensors:
        largest = float(file.tensors[LLAMA3].floats().max())
        scaled = {"factor": largest, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        return own | scaled | {"rope_type": "llama3", "original_max_position_embeddings": 8192}
    if architecture == "phi3":
        own = own | {"partial_rotary_factor": about.get("dimension_count", _head(config)) / _head(config)}
        if LONG not in file.tensors:
            return own
        scaled = {
            "long_factor": file.tensors[LONG].floats().tolist(),
            "short_factor": file.tensors[SHORT].floats().tolist(),
        }
        if about.get("scaling.attn_factor"):
            scaled["attention_factor"] = about["scaling.attn_factor"]
        return own | scaled | {"rope_type": "longrope", "original_max_position_embeddings": original}
    if kind in (None, "none") or factor is None:
        return None
    if architecture == "gemma3":  # of its layers that see everything
        return own | {"full_attention": own["full_attention"] | {"rope_type": kind, "factor": factor}}
    scaled = {"rope_type": kind, "factor": factor}
    return own | scaled | ({"original_max_position_embeddings": original} if original else {})


def _check_sizes(file: GgufFile, config: Any) -> None:
    """Raise a ValueError if tensors are not of the described sizes, of which modules and tables are then made."""
    blocks = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    if len(blocks) != config.num_hidden_layers:
        raise ValueError(f"block_count is {config.num_hidden_layers}, and there are tensors of {len(blocks)} blocks")
    for name, expected in (
        ("token_embd.weight", (config.vocab_size, config.hidden_size)),
        ("blk.0.attn_q.weight", (config.num_attention_heads * _head(config), config.hidden_size)),
        ("blk.0.attn_output.weight", (config.hidden_size, config.num_attention_heads * _head(config))),
    ):
        shape = file.tensors[name].shape if name in file.tensors else expected
        if shape != expected:
            raise ValueError(f"the tensor {name!r} has the shape {list(shape)}, and not {list(expected)}")


def _head(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _check_llama3(file: GgufFile, config: Any) -> None:
    """Raise a ValueError if a file's frequencies are not those of Llama 3's way with that factor."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = config.rope_parameters["rope_theta"] ** (-np.arange(len(scaled)) / len(scaled))
    if not np.allclose(plain / scaled.numpy(), file.tensors[LLAMA3].floats(), rtol=1e-3):
        raise ValueError(f"the frequencies in {LLAMA3!r} are not Llama 3's")
