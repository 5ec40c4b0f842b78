#!/usr/bin/env bash
# transformers 5.24.0 keeps the streamer of generate(streamer=..., custom_generate=loop) to itself: the streamer gets the
# prompt, the callable does not get the streamer, even if it names it among its arguments, and nobody calls its end().
# Code that reads from a TextIteratorStreamer would wait for the end. The built-in loop passes tokens on and calls end().
#
# usage: bash findings/transformers_custom_loop_streamer.sh    (installs into a temporary folder; exits 0 while it is so)
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
from transformers import LlamaConfig, LlamaForCausalLM


class Recording:
    """A streamer that records its calls."""

    def __init__(self):
        self.calls = []

    def put(self, value):
        self.calls.append(f"put({tuple(value.shape)})")

    def end(self):
        self.calls.append("end()")


seen = {}


def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, streamer=None, **inputs):
    seen["streamer"] = streamer
    return torch.cat([input_ids, input_ids[:, -1:]], 1)


torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
ids = torch.tensor([[5, 9, 3]])
own, custom = Recording(), Recording()
model.generate(ids, max_new_tokens=2, min_new_tokens=2, do_sample=False, streamer=own)
model.generate(ids, max_new_tokens=2, do_sample=False, streamer=custom, custom_generate=loop)
print("torch", torch.__version__, "transformers", transformers.__version__)
print("built-in loop: ", *own.calls)
print("custom loop:   ", *custom.calls)
print("streamer that the custom loop was given:", seen["streamer"])
as_described = own.calls[-1] == "end()" and custom.calls == ["put((1, 3))"] and seen["streamer"] is None
print("as described" if as_described else "this has changed")
sys.exit(not as_described)
P
