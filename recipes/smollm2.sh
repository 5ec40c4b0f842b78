#!/bin/sh
# EAGLE-3's head for SmolLM2-135M-Instruct that ships with draftree, src/draftree/data/drafters/eagle-3:
#
#     sh recipes/smollm2.sh MODEL QUESTIONS OUT
#
# MODEL is the model's folder in float32, QUESTIONS a folder with the training part of the sets below as JSON lines with a
# "prompt". The head is trained on answers to the first 250 questions of each set, and then on those to the next 200. On one core
# answers take about an hour each time, training half an hour. Begun again, the script goes on where it stopped. (The head that
# ships was trained on its first answers' tokens alone, before draftree recorded probabilities.)
set -eu
model=$1 questions=$2 out=$3
sets="e2e gsm8k sgd_chat wikisql tldr_shell py_functions leetcode_py squad scitldr wikisplit tm4_coffee fairytaleqa"
mkdir -p "$out/first" "$out/next"
for name in $sets; do
    head -n 250 "$questions/$name.jsonl" > "$out/first/$name.jsonl"
    tail -n +251 "$questions/$name.jsonl" | head -n 200 > "$out/next/$name.jsonl"
done
for part in first next; do
    draftree train data "$out/$part" -m "$model" --template full --batch 16 --max-new-tokens 192 --out "$out/$part-answers"
done
train() { # PART HEAD OPTIONS
    part=$1 head=$out/$2 resume=
    shift 2
    [ ! -f "$head/recipe.json" ] || return 0
    ! ls -d "$head"/checkpoints/checkpoint-* > /dev/null 2>&1 || resume=--resume
    draftree train eagle3 --data "$out/$part-answers" --states "$out/$part-states" --out "$head" -m "$model" --bf16 --threads 1 \
        $resume "$@"
}
train first first-head --draft-vocab 8192 --steps 1400 --learning-rate 8e-4 --dev-rows 60
train next eagle-3 --from "$out/first-head" --steps 1000 --learning-rate 6e-4 --dev-rows 100
