"""GGUF files of llama-shaped models, whose weights stay in their bits.

transformers reads a file's configuration and tokenizer, and says how its tensors relate to those of its classes. Its
own loader dequantises all weights into float32, which takes a file of 4 bits to eight times its size. Here linears and
the embedding keep the file's blocks (`runner.weights.blocks`); all else is an ordinary model of transformers.

Other architectures, types of tensors and places of a model are left to transformers' loader.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from draftree.errors import brief
from draftree.gguf.config import ARCHITECTURES, ROPE_TENSORS, config_of, stop_tokens
from draftree.gguf.quantize import tied_head
from draftree.gguf.reader import FLOATS, GgufFile, TensorInfo, read_gguf
from draftree.gguf.recode import OTHERS, recoded
from draftree.native import load_library
from draftree.runner.weights.blocks import FORMATS, PackedEmbedding, pack_blocks
from draftree.runner.weights.packed import PackedLinear


def load_gguf(path: Path) -> tuple[Any, Any] | None:
    """Load a model and its tokenizer from a GGUF file, weights in their blocks.

    Args:
        path: of the file.

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
    """Give a tensor of the file its place in the model.

    Raises:
        ValueError: it has another shape.
    """
    place, _, last = name.rpartition(".")
    module: Any = model.get_submodule(place)
    expected = tuple(getattr(module, last).shape)
    if tensor.shape != expected:
        raise ValueError(f"The tensor {gguf_name!r} has the shape {list(tensor.shape)}, and not {list(expected)}.")
    if tensor.kind in FLOATS:
        made = np.ascontiguousarray(processor.process(weights=tensor.floats(), name=gguf_name).weights)
        setattr(module, last, nn.Parameter(torch.from_numpy(made)))
        return
    if len(expected) != 2:
        raise ValueError(
            f"The tensor {gguf_name!r} has {len(expected)} dimensions and blocks: download the file again."
        )
    rows = processor.process(weights=tensor.data.reshape(expected[0], -1), name=gguf_name).weights  # reorders rows
    kind, rows = recoded(tensor.kind, np.asarray(rows))
    blocks = kind, expected[1]
    panels = pack_blocks(rows, *blocks)
    packed: nn.Module
    if isinstance(module, nn.Embedding):
        packed = PackedEmbedding(panels, kind, module)
    else:
        packed = PackedLinear(panels, expected[0], module.bias, torch.float32, blocks)
    model.set_submodule(place, packed)


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
