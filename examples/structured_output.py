"""Hold an answer to a pydantic model. What its schema forces is drafted, so it costs few passes."""

import sys

from pydantic import BaseModel, ConfigDict, Field

import draftree
from draftree.models import packaged_model


class Restaurant(BaseModel):
    """What the answer must be."""

    model_config = ConfigDict(extra="forbid")  # these fields and no others
    name: str = Field(max_length=20)
    cheap: bool
    stars: int = Field(ge=1, le=5)


model, tokenizer = draftree.load_model(sys.argv[1] if len(sys.argv) > 1 else packaged_model())
messages = [{"role": "user", "content": "Describe the restaurant Blue Spice as JSON."}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
out = draftree.generate(
    model,
    **inputs,
    drafter=draftree.Merge([draftree.Lookahead(), draftree.GrammarDrafter()]),
    grammar=draftree.Grammar.json_schema(Restaurant),
    tokenizer=tokenizer,
    do_sample=False,
    max_new_tokens=200,
)
answer = tokenizer.decode(out.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
print(Restaurant.model_validate_json(answer))
print(f"tokens a step: {out.stats.total.acceptance_length:.2f}")
