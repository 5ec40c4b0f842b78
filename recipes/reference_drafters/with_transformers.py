"""Write tiny targets that carry an MTP head of their own, and record what transformers' own layers make of it.

transformers 5.24.0 drops these tensors on loading, so they are appended to what it saves, under the published names.
It runs in the environment of `with_dflash.py`:

    reference/bin/python recipes/reference_drafters/with_transformers.py tests/data/drafters
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import HIDDEN, VOCAB, randomize, record, taps, text
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

STEPS = 3
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
    "head_dim": 16,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}


class Head(nn.Module):
    """Draft by a decoder layer of the target's own kind, from the target's state and the next token's embedding."""

    def __init__(self, model: nn.Module, index: int) -> None:
        super().__init__()
        decoder = model.model
        kind, norm = type(decoder.layers[-1]), type(decoder.norm)
        sizes = model.config.hidden_size, model.config.rms_norm_eps
        self.enorm, self.hnorm, self.norm = (norm(sizes[0], eps=sizes[1]) for _ in range(3))
        self.eh_proj = nn.Linear(2 * sizes[0], sizes[0], bias=False)
        self.block = kind(model.config, index)

    def forward(self, model: nn.Module, states: Tensor, tokens: Tensor, start: int, cache: DynamicCache) -> Tensor:
        """Return the head's states behind its final norm, [1, rows, hidden]; rows before `start` lie in `cache`."""
        embedded = model.get_input_embeddings()(tokens)
        rows = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(states)], dim=-1))
        places = start + torch.arange(tokens.shape[1])
        hidden = torch.arange(start + tokens.shape[1]) > places[:, None]
        mask = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))[None, None]
        turn = model.model.rotary_emb(rows, places[None])
        return self.norm(self.block(rows, position_embeddings=turn, attention_mask=mask, cache=cache))


@torch.no_grad()
def answers(model: nn.Module, head: Head, ids: Tensor, states: Tensor) -> dict[str, Tensor]:
    """Return `logits.0` of the true rows and `logits.1`, `logits.2` of recursions from each, as an engine runs them."""
    found: dict[str, list[Tensor]] = {f"logits.{step}": [] for step in range(STEPS)}
    for row in range(len(ids) - 1):
        cache, start = DynamicCache(), 0
        given, tokens = states[None, : row + 1], ids[None, 1 : row + 2]
        for step in range(min(STEPS, len(ids) - 1 - row)):
            out = head(model, given, tokens, start, cache)
            found[f"logits.{step}"].append(model.lm_head(out)[0, -1])
            start += tokens.shape[1]
            given, tokens = out[:, -1:], ids[None, row + 2 + step : row + 3 + step]
    return {name: torch.stack(rows) for name, rows in found.items()}


def one_by_one(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a layer with its experts apart, as published files have them."""
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for index, both in enumerate(tensor):
                for part, weight in zip(("gate", "up"), both.chunk(2), strict=True):
                    yield name.replace("gate_up_proj", f"{index}.{part}_proj.weight"), weight
        elif name.endswith("experts.down_proj"):
            for index, weight in enumerate(tensor):
                yield name.replace("down_proj", f"{index}.down_proj.weight"), weight
        else:
            yield name, tensor


def write(folder: Path, seed: int, model: nn.Module, index: int, qwen: bool, extra: dict[str, Any]) -> None:
    """Write a target with its head, and record both on one text.

    Args:
        folder: of the target.
        seed: of the weights and the text.
        model: the target.
        index: a layer number that gives the head the right kind of layer.
        qwen: names begin with `mtp.`, norm weights lie around zero; otherwise `model.layers.N.`.
        extra: what the published configuration says of the head.
    """
    model.eval()
    head = Head(model, index).eval()
    for module, number in ((model, seed), (head, seed + 1)):
        randomize(module, number, zero_centred=qwen)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **extra}, indent=2) + "\n")
    parts = dict(one_by_one({name: tensor.detach() for name, tensor in head.block.state_dict().items()}))
    own = {
        "enorm": head.enorm.weight,
        "hnorm": head.hnorm.weight,
        "eh_proj": head.eh_proj.weight,
        "norm": head.norm.weight,
    }
    if qwen:
        names = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "norm": "norm"}
        added = {f"mtp.{names[name]}.weight": weight for name, weight in own.items()}
        added |= {f"mtp.layers.0.{name}": weight for name, weight in parts.items()}
    else:
        own["shared_head.norm"] = own.pop("norm")
        own["shared_head.head"], own["embed_tokens"] = model.lm_head.weight, model.get_input_embeddings().weight
        last = f"model.layers.{model.config.num_hidden_layers}."
        added = {f"{last}{name}.weight": weight for name, weight in own.items()}
        added |= {f"{last}{name}": weight for name, weight in parts.items()}
    whole = {**load_file(folder / "model.safetensors"), **added}
    save_file({name: tensor.detach().contiguous().clone() for name, tensor in whole.items()},
              folder / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    ids = text(seed)
    hidden = taps(model, ids)
    last_state = f"hidden.{model.config.num_hidden_layers}"
    used = {name: hidden[name] for name in (last_state, "hidden.final")}
    record(folder, {"input_ids": ids, **used, **answers(model, head, ids, hidden["hidden.final"])})


def main() -> None:
    """Write all targets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    one = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    qwen35 = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES, **LINEAR, num_hidden_layers=2))
    write(out / "qwen3_5_mtp", 61, qwen35, 1, True, one)
    following = Qwen3NextConfig(**SIZES, **LINEAR, **EXPERTS, num_hidden_layers=2, num_experts=3,
                                shared_expert_intermediate_size=16)  # fmt: skip
    write(out / "qwen3_next_mtp", 63, Qwen3NextForCausalLM(following), 1, True, {})
    moe = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_hidden_layers": 2, "first_k_dense_replace": 1}
    turn = {"rope_type": "default", "rope_theta": 500.0}
    glm = Glm4MoeConfig(**SIZES, **EXPERTS, **moe, head_dim=16, use_qk_norm=True,
                        rope_parameters={**turn, "partial_rotary_factor": 0.5})  # fmt: skip
    write(out / "glm4_moe_mtp", 65, Glm4MoeForCausalLM(glm), 1, False, {"num_nextn_predict_layers": 1})
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    deepseek = DeepseekV3Config(**{**SIZES, "num_key_value_heads": 2}, **EXPERTS, **moe, **latent, rope_parameters=turn)
    write(out / "deepseek_v3_mtp", 69, DeepseekV3ForCausalLM(deepseek), 1, False, {"num_nextn_predict_layers": 1})


if __name__ == "__main__":
    main()
