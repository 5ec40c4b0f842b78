"""Hold a dialogue. The second answer reads only what is new, and drafts from the first."""

import sys

import draftree
from draftree.models import packaged_model

model, tokenizer = draftree.load_model(sys.argv[1] if len(sys.argv) > 1 else packaged_model())
with draftree.Chat(model, tokenizer, draftree.Lookahead(), max_new_tokens=64) as chat:
    for question in ("Recommend a quiet restaurant by the river.", "And a cheaper one?"):
        print("you:", question)
        print("model: ", end="")
        for piece in chat.send(question):
            print(piece, end="", flush=True)
        print()
