"""Answer many prompts with one engine: four at a time, and the next one joins when one is done."""

import sys

import draftree
from draftree.models import packaged_model

TASKS = ("count the lines of a file", "find files by name", "show free memory", "copy a folder", "stop a process")

model, tokenizer = draftree.load_model(sys.argv[1] if len(sys.argv) > 1 else packaged_model())
with draftree.Engine(model, drafter=draftree.Lookahead(), slots=4) as engine:
    requests = []
    for task in TASKS:
        messages = [{"role": "user", "content": f"Write a shell command to {task}."}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        requests.append(engine.add(prompt, max_new_tokens=32))
    engine.run()
for task, request in zip(TASKS, requests, strict=True):
    answer = tokenizer.decode(request.tokens, skip_special_tokens=True)
    print(f"{task}: {answer} ({request.finish_reason}, {request.stats.acceptance_length:.2f} tokens a step)")
