"""Load GGUF files of llama-shaped models with their weights left in blocks.

transformers reads a file's tokenizer and relates its tensors to those of its classes. Its own loader dequantises all
weights into float32, which takes a 4-bit file to eight times its size. Here linears and the embedding keep the file's
blocks (`runner.weights.blocks`). All else is an ordinary model of transformers. Other architectures and tensor types
are left to transformers' loader.

The configuration is read here: transformers' reading lacks RoPE scaling and the tokens that end a turn. Llama 3.1,
Phi-3 of 128k and Gemma 3 of 4B and more were trained with scaled positions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from draftree.errors import brief
from draftree.gguf.quantize import tied_head
from draftree.gguf.reader import FLOATS, OTHERS, GgufFile, TensorInfo, read_gguf, recoded
from draftree.native import load_library
from draftree.runner.weights.blocks import FORMATS, PackedEmbedding, pack_blocks
from draftree.runner.weights.packed import PackedLinear

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
    """Return the configuration of transformers that a file describes."""
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


def _head(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _check_llama3(file: GgufFile, config: Any) -> None:
    """Raise a ValueError if a file's frequencies are not those of Llama 3's way with that factor."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = config.rope_parameters["rope_theta"] ** (-np.arange(len(scaled)) / len(scaled))
    if not np.allclose(plain / scaled.numpy(), file.tensors[LLAMA3].floats(), rtol=1e-3):
        raise ValueError(f"the frequencies in {LLAMA3!r} are not Llama 3's")


def load_gguf(path: Path) -> tuple[Any, Any] | None:
    """Load a model and its tokenizer from a GGUF file, weights in their blocks.

    Returns:
        (model, tokenizer): a model of transformers in float32 on the CPU, in evaluation mode; None if its architecture,
        or a type of its tensors, is one that only transformers' loader reads.

    Raises:
        ValueError: the file is damaged, or its tensors are not those of its architecture; names the tensor.
    """
    file = read_gguf(path)
    kinds = {tensor.kind for tensor in file.tensors.values()}
    known = file.metadata.get("general.architecture") in ARCHITECTURES and kinds <= {*FORMATS, *OTHERS, *FLOATS}
    if not known or load_library() is None:
        return None
    return _model(path, file), _tokenizer(path)


def _tokenizer(path: Path) -> Any:
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    try:
        return TokenizersBackend.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # of a vocabulary without merges, or of a kind that transformers does not know
        raise ValueError(f"No tokenizer can be made of {str(path)!r} ({brief(error)}): download it again.") from error


def _model(path: Path, file: GgufFile) -> Any:
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    architecture = file.metadata["general.architecture"]
    try:
        config = config_of(file)
        blocks = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
        if len(blocks) != config.num_hidden_layers:  # Before so many layers are made.
            raise ValueError(
                f"block_count is {config.num_hidden_layers}, and there are tensors of {len(blocks)} blocks"
            )
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        names = _names(model, architecture, config.num_hidden_layers)
    except Exception as error:  # settings that no model can have end in all kinds of errors
        raise ValueError(f"{str(path)!r} describes no model ({brief(error)}): download it again.") from error
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    for name in sorted(file.tensors.keys() - ROPE_TENSORS):
        if name not in names:
            raise ValueError(f"{str(path)!r}: the tensor {name!r} is not one of a '{config.model_type}' model.")
        _put(model, names[name], file.tensors[name], name, processor)
    _tie(model)
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise ValueError(f"{str(path)!r} lacks weights of {type(model).__name__}: {', '.join(missing[:3])}.")
    model.generation_config = GenerationConfig.from_model_config(model.config)
    model.generation_config.eos_token_id = stop_tokens(file.metadata)
    return model.eval()


def _names(model: Any, architecture: str, layers: int) -> dict[str, str]:
    """Return transformers' names of parameters by GGUF's of tensors."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture)
    known, found = get_tensor_name_map(kind, layers), {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        module, _, last = name.rpartition(".")
        of_file = known.get_name(module)
        if of_file is not None:
            found[f"{of_file}.{last}"] = name
    return found


def _put(model: Any, name: str, tensor: TensorInfo, gguf_name: str, processor: Any) -> None:
    """Give a tensor of the file its place in the model."""
    place, _, last = name.rpartition(".")
    module: Any = model.get_submodule(place)
    expected = tuple(getattr(module, last).shape)
    if tensor.shape != expected:
        raise ValueError(f"The tensor {gguf_name!r} has the shape {list(tensor.shape)}, and not {list(expected)}.")
    if tensor.kind in FLOATS:
        made = np.ascontiguousarray(processor.process(weights=tensor.floats(), name=gguf_name).weights)
        setattr(module, last, nn.Parameter(torch.from_numpy(made)))
        return
    rows = processor.process(weights=tensor.data.reshape(expected[0], -1), name=gguf_name).weights  # reorders rows
    kind, rows = recoded(tensor.kind, np.asarray(rows))
    blocks = kind, expected[1]
    packed = pack_blocks(rows, *blocks)
    replacement: nn.Module
    if isinstance(module, nn.Embedding):
        replacement = PackedEmbedding(packed, kind, module)
    else:
        replacement = PackedLinear(packed, expected[0], module.bias, torch.float32, blocks)
    model.set_submodule(place, replacement)


def _tie(model: Any) -> None:
    """Let a tied head read the embedding's weights."""
    if not model.config.tie_word_embeddings:
        return
    embedding = model.get_input_embeddings()
    if isinstance(embedding, PackedEmbedding):
        model.lm_head = tied_head(embedding)
    else:
        weight: Tensor = embedding.weight
        model.lm_head.weight = weight
