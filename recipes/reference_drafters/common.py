"""Share one tiny random target, random weights and the form of the recordings between the scripts of this folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 64
DRAFT_VOCAB = 40
HIDDEN = 16
LAYERS = 8  # of the target
TOKENS = 12  # of the recorded text


def randomize(module: nn.Module, seed: int, zero_centred: bool = False) -> None:
    """Fill all parameters with random numbers: matrices keep the size of their input, norms lie around one.

    Args:
        module: any module.
        seed: of the random numbers.
        zero_centred: norm weights lie around zero, for models that apply 1 + weight.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() > 1:
                table = any(part in name for part in ("embed", "codebook", "mask_hidden", "markov_w1"))
                gain = 0.4 if "kernel" in name else 1.4  # of dynamic convolutions, which multiply
                weight.copy_(noise if table else noise * gain / weight.shape[-1] ** 0.5)
                if name.endswith("base_kernel"):
                    weight[:, 0] += 1
            elif name.endswith("bias"):
                weight.copy_(noise * 0.2)
            else:
                zero = zero_centred and "linear_attn" not in name
                weight.copy_((0 if zero else 1) + 0.3 * noise.clamp(-1, 1))
        for name, buffer in module.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)


def text(seed: int, tokens: int = TOKENS) -> Tensor:
    """Return random token ids, LongTensor [tokens]."""
    return torch.randint(0, VOCAB, (tokens,), generator=torch.Generator().manual_seed(seed))


def reduced(seed: int) -> dict[str, Tensor | int]:
    """Return a draft vocabulary of 40 random target tokens, as `d2t` (offsets) and `t2d` (a mask)."""
    kept = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:DRAFT_VOCAB].sort().values
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[kept] = True
    return {"d2t": kept - torch.arange(DRAFT_VOCAB), "t2d": mask, "draft_vocab_size": DRAFT_VOCAB}


def write_target(folder: Path) -> None:
    """Write the tiny Llama that all separate drafters draft for."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    randomize(model, seed=1)
    model.save_pretrained(folder)


@torch.no_grad()
def taps(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Return what a drafter may read of the target.

    Returns:
        `hidden.K` float32 [tokens, hidden]: the residual stream that enters decoder layer K, which is
        `outputs.hidden_states[K]`. `hidden.N`, N the number of layers, is the output of the last layer *before* the
        final norm, unlike `outputs.hidden_states[N]`, which is `hidden.final`.
    """
    before_norm: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, given: before_norm.append(given[0]))
    states = model(ids[None], output_hidden_states=True).hidden_states
    hook.remove()
    found = {f"hidden.{index}": state[0] for index, state in enumerate(states[:-1])}
    return {**found, f"hidden.{len(states) - 1}": before_norm[0][0], "hidden.final": states[-1][0]}


def joined(hidden: Mapping[str, Tensor], layers: list[int | str]) -> Tensor:
    """Return the tapped states of `layers` side by side, float32 [1, tokens, len(layers) * hidden]."""
    return torch.cat([hidden[f"hidden.{layer}"] for layer in layers], dim=-1)[None]


def record(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write `recorded.safetensors` beside a drafter: what it was given and what it answered."""
    found = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    save_file(found, folder / "recorded.safetensors")
    for name in ("config.py", "generation_config.json"):
        (folder / name).unlink(missing_ok=True)
    size = sum(file.stat().st_size for file in folder.iterdir())
    answers = {name: list(tensor.shape) for name, tensor in found.items() if not name.startswith("hidden.")}
    print(f"{folder.name}: {size:,} bytes, {json.dumps(answers)}")
