"""Tiny models that read images, and prompts with images of random pixels as their processors lay them out."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, CLIPImageProcessorPil, LlavaProcessor

IMAGE, BEGIN, END = 100, 102, 103  # the tokens of a part of an image, and around an image
TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
LLAMA = TEXT | {"model_type": "llama"}
GLM_ANGLES = {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
MROPE = TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
GEMMA = TEXT | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA4 = GEMMA | {
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 128,
    "num_kv_shared_layers": 2,
    "global_head_dim": 32,
}
MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
DELTA = MROPE | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
EYES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
EYES |= {"image_size": 16, "patch_size": 4}
QWEN_EYES = {"hidden_size": 32, "intermediate_size": 32, "depth": 2, "num_heads": 2, "patch_size": 4}
QWEN_EYES |= {"out_hidden_size": 64}
QWEN = {"image_token_id": IMAGE, "video_token_id": 101, "vision_start_token_id": BEGIN, "vision_end_token_id": END}
IDEFICS = {"text_config": LLAMA, "vision_config": EYES, "scale_factor": 2, "image_token_id": IMAGE}
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "text_config": MROPE,
        "vision_config": {"embed_dim": 32, "hidden_size": 64, "depth": 1, "num_heads": 2, "patch_size": 4},
        **QWEN,
    },
    "qwen2_5_vl": {
        "text_config": MROPE,
        "vision_config": QWEN_EYES | {"fullatt_block_indexes": [0], "window_size": 16},
        **QWEN,
    },
    "qwen3_vl": {
        "text_config": MROPE,
        "vision_config": QWEN_EYES | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        **QWEN,
    },
    "gemma3": {
        "text_config": GEMMA,
        "vision_config": EYES | {"model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
        "image_token_id": IMAGE,
        "boi_token_index": BEGIN,
        "eoi_token_index": END,
    },
    "llava": {
        "text_config": LLAMA,
        "vision_config": EYES | {"model_type": "clip_vision_model"},
        "image_token_id": IMAGE,
        "image_seq_length": 16,
    },
    "idefics3": IDEFICS,
    "smolvlm": IDEFICS,
    "qwen3_vl_moe": {
        "text_config": MROPE | MOE,
        "vision_config": QWEN_EYES | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        **QWEN,
    },
    "glm4v": {
        "text_config": TEXT | {"rope_parameters": {**MROPE["rope_parameters"], **GLM_ANGLES}},
        "vision_config": QWEN_EYES | {"image_size": 16},
        "image_token_id": IMAGE,
        "video_token_id": 101,
        "image_start_token_id": BEGIN,
        "image_end_token_id": END,
    },
    "idefics2": {
        "text_config": TEXT | {"model_type": "mistral"},
        "vision_config": EYES,
        "perceiver_config": {
            "resampler_n_latents": 4,
            "resampler_depth": 1,
            "resampler_n_heads": 2,
            "resampler_head_dim": 16,
            "num_key_value_heads": 2,
        },
        "image_token_id": IMAGE,
    },
    "internvl": {
        "text_config": TEXT | {"model_type": "qwen2"},
        "vision_config": EYES | {"model_type": "internvl_vision", "image_size": [16, 16], "patch_size": [4, 4]},
        "image_token_id": IMAGE,
        "image_seq_length": 4,
    },
    "aya_vision": {
        "text_config": TEXT | {"model_type": "cohere2"},
        "vision_config": EYES | {"model_type": "siglip_vision_model"},
        "image_token_id": IMAGE,
    },
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral"},
        "vision_config": EYES | {"model_type": "pixtral"},
        "image_token_id": IMAGE,
        "spatial_merge_size": 2,
    },
    "vipllava": {
        "text_config": LLAMA,
        "vision_config": EYES | {"model_type": "clip_vision_model"},
        "image_token_id": IMAGE,
        "vision_feature_layers": [-1, -2],
        "image_seq_length": 16,
    },
    "llava_next": {
        "text_config": LLAMA,
        "vision_config": EYES | {"model_type": "clip_vision_model"},
        "image_token_id": IMAGE,
        "image_grid_pinpoints": [[16, 16]],
        "image_seq_length": 16,
    },
    "llava_onevision": {
        "text_config": TEXT | {"model_type": "qwen2"},
        "vision_config": EYES | {"model_type": "siglip_vision_model"},
        "image_token_id": IMAGE,
        "video_token_id": 101,
        "image_grid_pinpoints": [[16, 16]],
        "vision_feature_select_strategy": "full",
    },
    "paligemma": {
        "text_config": TEXT | {"model_type": "gemma"},
        "vision_config": EYES | {"model_type": "siglip_vision_model"},
        "projection_dim": 64,
        "image_token_index": IMAGE,
    },
    "qwen3_5": {
        "text_config": DELTA,
        "vision_config": QWEN_EYES | {"num_position_embeddings": 16},
        **QWEN,
    },
    "qwen3_5_moe": {
        "text_config": DELTA | MOE | {"shared_expert_intermediate_size": 32},
        "vision_config": QWEN_EYES | {"num_position_embeddings": 16},
        **QWEN,
    },
    "gemma4": {
        "text_config": GEMMA4 | {"use_bidirectional_attention": "vision"},
        "vision_config": EYES
        | {"model_type": "gemma4_vision", "head_dim": 16, "num_key_value_heads": 2, "pooling_kernel_size": 2},
        "image_token_id": IMAGE,
        "video_token_id": 101,
        "audio_token_id": 99,
        "boi_token_id": BEGIN,
        "eoi_token_id": END,
    },
    "lfm2_vl": {
        "text_config": TEXT
        | {
            "model_type": "lfm2",
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": False,
        },
        "vision_config": EYES | {"model_type": "siglip2_vision_model", "num_patches": 16},
        "projector_hidden_size": 32,
        "image_token_id": IMAGE,
    },
}
GLM = SETTINGS["glm4v"]
SETTINGS["glm46v"] = GLM | {
    "text_config": GLM["text_config"] | {"model_type": "glm4v_text"},
    "vision_config": GLM["vision_config"] | {"model_type": "glm4v_vision"},
}
EXPERTS = {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
SETTINGS["glm4v_moe"] = GLM | {"text_config": GLM["text_config"] | MOE | EXPERTS}
SETTINGS["cohere2_vision"] = SETTINGS["aya_vision"]
FAMILIES = tuple(SETTINGS)
# Placeholders of an image.
PARTS = dict.fromkeys(
    ("gemma3", "idefics2", "idefics3", "smolvlm", "internvl", "aya_vision", "cohere2_vision", "mistral3"), 4
)
PARTS |= {"cohere2_vision": 4, "llava": 16, "paligemma": 16, "vipllava": 16, "llava_next": 36, "llava_onevision": 36}


def seeing_model(family: str, **settings: Any) -> Any:
    """Return a tiny model with weights that make its answers depend on the images."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SETTINGS[family] | settings)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model


def image_prompts(model: Any, counts: list[int], seed: int = 0) -> dict[str, Tensor]:
    """Return what a processor would for a batch of prompts with so many images each, padded in front."""
    family, noise = model.config.model_type, torch.Generator().manual_seed(seed)
    images, inputs = sum(counts), {}
    parts = [PARTS.get(family, 0)] * images
    if family in ("idefics2", "idefics3", "smolvlm"):
        shown = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
        pixels = torch.randn(len(counts), max(counts), 3, 16, 16, generator=noise)
        inputs["pixel_values"] = pixels * shown[:, :, None, None, None]
        inputs["pixel_attention_mask"] = shown[:, :, None, None].long().expand(-1, -1, 16, 16)
    elif family.startswith(("qwen", "glm")):
        grid = torch.tensor([[1, 2 + 2 * (i % 2), 4] for i in range(images)])
        eyes = model.config.vision_config
        width = 3 * eyes.temporal_patch_size * eyes.patch_size**2
        inputs["pixel_values"] = torch.randn(int(grid.prod(-1).sum()), width, generator=noise)
        inputs["image_grid_thw"] = grid
        parts = (grid.prod(-1) // eyes.spatial_merge_size**2).tolist()
    elif family == "lfm2_vl":  # Patches of images of different shapes, padded to the largest.
        shapes = torch.tensor([[2 + 2 * (i % 2), 4] for i in range(images)])
        inputs["pixel_attention_mask"] = (torch.arange(16) < shapes.prod(1)[:, None]).long()
        inputs["pixel_values"] = torch.randn(images, 16, 48, generator=noise)
        inputs["spatial_shapes"] = shapes
        parts = (shapes.prod(1) // 4).tolist()
    elif family == "gemma4":
        places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1).reshape(1, 16, 2)
        inputs["image_position_ids"] = places.repeat(images, 1, 1)
        inputs["image_position_ids"][1::2, 8:] = -1  # Every other image has half as many rows.
        inputs["pixel_values"] = torch.rand(images, 16, 48, generator=noise)
        parts = [4 - 2 * (i % 2) for i in range(images)]
    else:
        inputs["pixel_values"] = torch.randn(images, 3, 16, 16, generator=noise)
        if family in ("llava_next", "llava_onevision", "mistral3"):
            inputs["image_sizes"] = torch.tensor([[16, 16]] * images)
        if family in ("llava_next", "llava_onevision"):  # The whole image, then its only tile.
            inputs["pixel_values"] = inputs["pixel_values"][:, None].repeat(1, 2, 1, 1, 1)

    def words(count: int) -> list[int]:
        return torch.randint(3, 97, (count,), generator=noise).tolist()

    rows, left = [], iter(parts)
    for b, count in enumerate(counts):
        row = words(5 + 2 * b)
        for _ in range(count):
            image = [IMAGE] * next(left)
            if family == "mistral3":  # Its lines have an end.
                image[2:2] = [END]
            row += [BEGIN, *image, END, *words(3)]
        rows.append(row)
    longest = max(map(len, rows))
    inputs["input_ids"] = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    inputs["attention_mask"] = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    types = {"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids"}.get(
        family, "mm_token_type_ids" if "image_grid_thw" in inputs else None
    )
    if family == "paligemma":
        inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    if types is not None:
        inputs[types] = (inputs["input_ids"] == IMAGE).long()
    return inputs


LLAVA_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' }}{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for p in m['content'] %}{{ '<image>' if p['type'] == 'image' else p['text'] }}{% endfor %}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def llava_folder(folder: Path, tokenizer: Any) -> Path:
    """Write a tiny LLaVA with its processor; return its folder."""
    own = copy.deepcopy(tokenizer)
    own.add_special_tokens({"additional_special_tokens": ["<image>"]})
    own.chat_template = LLAVA_TEMPLATE
    token = own.convert_tokens_to_ids("<image>")
    settings = {"vocab_size": len(own), "max_position_embeddings": 512, "eos_token_id": own.eos_token_id}
    model = seeing_model("llava", text_config=LLAMA | settings, image_token_id=token)
    model.save_pretrained(folder)
    size = {"height": 16, "width": 16}
    eyes = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=size)
    processor = LlavaProcessor(eyes, own, patch_size=4, vision_feature_select_strategy="default")
    processor.num_additional_image_tokens = 1
    processor.save_pretrained(folder)
    return folder
