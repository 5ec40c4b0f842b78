#!/usr/bin/env bash
# transformers 5.24.0: GLM-4V with a prompt of two images A and B and num_return_sequences=2 (or two beams) repeats each
# image's features by themselves, A A B B, instead of A B A B. The first answer is about A and A, the second about B and
# B, without a warning. Qwen2-VL, which the same prompt suits, answers twice about A and B.
#
# usage: bash findings/transformers_glm4v_copies.sh    (installs into a temporary folder; exits 0 while it is so)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'torch==2.13.0'
"$folder/venv/bin/pip" install --quiet 'transformers==5.24.0'
cd "$folder"
venv/bin/python - <<'P' 2>/dev/null
import sys

import torch
import transformers
from transformers import AutoConfig, AutoModelForImageTextToText

TEXT = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "eos_token_id": None}
ANGLES = {"rope_type": "default", "rope_theta": 10000.0}
EYES = {"hidden_size": 32, "intermediate_size": 32, "depth": 2, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64}
OWN = {
    "glm4v": {
        "text_config": {"rope_parameters": ANGLES | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}},
        "vision_config": EYES | {"image_size": 16},
        "image_start_token_id": 102,
        "image_end_token_id": 103,
    },
    "qwen2_vl": {
        "text_config": {"rope_parameters": ANGLES | {"mrope_section": [2, 3, 3]}},
        "vision_config": EYES | {"embed_dim": 32, "hidden_size": 64},
        "vision_start_token_id": 102,
        "vision_end_token_id": 103,
    },
}
print("torch", torch.__version__, "transformers", transformers.__version__)
wrong = {}
for family, settings in OWN.items():
    torch.manual_seed(0)
    own = settings | {"text_config": TEXT | settings["text_config"], "image_token_id": 100, "video_token_id": 101}
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(family, **own)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    a, b = torch.randn(2, 16, 3 * model.config.vision_config.temporal_patch_size * 16)
    ids = torch.tensor([[5, 102, 100, 100, 100, 100, 103, 7, 102, 100, 100, 100, 100, 103, 9]])

    def answers(*images, copies=1, model=model, ids=ids):
        made = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == 100).long(),
            pixel_values=torch.cat(images),
            image_grid_thw=torch.tensor([[1, 4, 4]] * 2),
            max_new_tokens=6,
            do_sample=True,
            top_k=1,
            num_return_sequences=copies,
        )
        return made[:, ids.shape[1] :].tolist()

    two = answers(a, b, copies=2)
    print(family, "about A and B, num_return_sequences=1:", *answers(a, b))
    print(family, "about A and B, num_return_sequences=2:", *two)
    print(family, "about A and A, and about B and B:     ", *answers(a, a), *answers(b, b))
    wrong[family] = two == [*answers(a, a), *answers(b, b)] and two != answers(a, b) * 2
as_described = wrong == {"glm4v": True, "qwen2_vl": False}
print("as described" if as_described else "this has changed")
sys.exit(not as_described)
P
