"""Draft inside Hugging Face's own `generate`: the same text, in fewer passes."""

import sys

import draftree
from draftree.models import packaged_model

model, tokenizer = draftree.load_model(sys.argv[1] if len(sys.argv) > 1 else packaged_model())
messages = [{"role": "user", "content": "Write a shell command that lists the largest files of a folder."}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
options = {"max_new_tokens": 64, "do_sample": False}

plain = model.generate(**inputs, **options)
stats = []
drafter = draftree.Lookahead()  # it learns from every answer: keep it for the next call
drafted = model.generate(**inputs, **options, custom_generate=draftree.custom_generate(drafter, on_stats=stats.append))

print(tokenizer.decode(drafted[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print("equal to Hugging Face:", drafted.tolist() == plain.tolist())
print(f"tokens a step: {stats[0].total.acceptance_length:.2f}")
