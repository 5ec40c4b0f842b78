#!/usr/bin/env bash
# llguidance 1.9.1 takes a text of a grammar for a special token where the tokenizer has one of that name, and then
# refuses it: for the grammar "<file_sep>" [a-z] its mask allows the special token alone, and its matcher accepts only
# the ordinary tokens that spell the text, which the mask forbids. No answer is possible. The mask of forced text is
# what the tokenizer makes of the text, special tokens included; the matcher goes by bytes, and a special token has
# none. `<think>` of Qwen 3 (an added token that is not special) is refused alike, as every added token <...> counts.
#
# usage: bash findings/llguidance_special_text.sh    (installs into a temporary folder; exits 0 while it is so)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'llguidance==1.9.1' 'tokenizers==0.23.3' 'numpy==2.3.5' 2>/dev/null
cd "$folder"
venv/bin/python - <<'P'
import sys
from importlib.metadata import version

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.add_special_tokens(["</s>", "<file_sep>"])
tokenizer.add_tokens([AddedToken("<think>", special=False)])
words = LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("</s>"))


def first(literal):
    """Return the tokens that the mask allows first, and whether the matcher accepts them and '<'."""
    matcher = LLMatcher(words, f'start: "{literal}" /[a-z]/', log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    allowed = np.flatnonzero(mask[: words.vocab_size]).tolist()
    spelled = tokenizer.token_to_id("<")
    accepts = [matcher.deep_copy().validate_tokens([token]) == 1 for token in (allowed[0], spelled)]
    return [tokenizer.id_to_token(token) for token in allowed], accepts


print(f"llguidance {version('llguidance')}, tokenizers {version('tokenizers')}")
as_said = True
for literal in ("<file_sep>", "<think>", "<other>"):
    allowed, accepts = first(literal)
    print(f"{literal}: the mask allows {allowed}; the matcher accepts {allowed[0]!r}: {accepts[0]}, '<': {accepts[1]}")
    as_said &= (allowed, accepts) == (([literal], [False, True]) if literal != "<other>" else (["<"], [True, True]))
print("As described." if as_said else "It has changed.")
sys.exit(0 if as_said else 1)
P
