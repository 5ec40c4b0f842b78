"""Train Medusa heads for a model on its own answers, then draft with them.

A few steps only, so that it ends in a minute: real heads want thousands of answers (docs/training.md).
"""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import draftree
from draftree.models import packaged_model

WHAT = ("lines", "files", "folders", "users", "processes", "words", "links", "archives")
name = sys.argv[1] if len(sys.argv) > 1 else packaged_model() or "embedded"
steps = sys.argv[2] if len(sys.argv) > 2 else "30"
with TemporaryDirectory() as work:
    questions, answers, heads = Path(work, "questions.jsonl"), Path(work, "answers"), Path(work, "heads")
    tasks = [f"{verb} {what}" for verb in ("count", "find", "copy", "sort", "join", "show") for what in WHAT]
    lines = [f'{{"prompt": "Write a shell command to {task}."}}' for task in tasks]
    questions.write_text("\n".join(lines))
    draftree_command = [sys.executable, "-m", "draftree"]
    subprocess.run(
        [*draftree_command, "train", "data", questions, "--model", name, "--out", answers, "--max-new-tokens", "32"],
        check=True,
    )
    subprocess.run(
        [*draftree_command, "train", "medusa", "--model", name, "--data", answers, "--out", heads, "--steps", steps],
        check=True,
    )
    model, tokenizer = draftree.load_model(name)
    drafter = draftree.load_drafter(heads, model)
    messages = [{"role": "user", "content": "Write a shell command to count lines."}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = draftree.generate(model, **inputs, drafter=drafter, do_sample=False, max_new_tokens=32)
    print(tokenizer.decode(out.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    print(f"tokens a step: {out.stats.total.acceptance_length:.2f}")
