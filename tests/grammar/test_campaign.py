"""Three thousand constrained answers of the embedded model: thirty schemas by a hundred prompts, greedy and sampled.

All are valid by `jsonschema`, equal to plain constrained decoding, and, greedy, to Hugging Face's `generate` with the
same library's mask.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from generate_driver import left_pad, same
from transformers import LogitsProcessorList

from benchmarks.machine.schemas import SCHEMAS, Reference, reference_grammar, reference_words
from draftree import Grammar, GrammarDrafter, Lookahead, Merge, generate
from draftree.models import encode_prompt
from draftree.prompts import embedded_prompts

BATCH, NEW = 10, 400
QUICK = {"nested": 1, "unicode": 1}  # batches of every day; the others, and the rest of these, are slow
CASES = [
    pytest.param(name, batch, marks=() if batch < QUICK.get(name, 0) else pytest.mark.slow)
    for name in SCHEMAS
    for batch in range(100 // BATCH)
]


@pytest.mark.parametrize(("name", "batch"), CASES)
def test_answers_of_a_schema(demo: Any, name: str, batch: int) -> None:
    chosen = embedded_prompts()[:: len(embedded_prompts()) // 100][batch * BATCH : (batch + 1) * BATCH]
    assert len(chosen) == BATCH
    ids, mask = left_pad([encode_prompt(demo.tokenizer, prompt.text) for prompt in chosen])
    width, eos, schema = ids.shape[1], demo.tokenizer.eos_token_id, SCHEMAS[name]
    words = reference_words(demo.tokenizer, demo.model.config.vocab_size, eos)
    processor = Reference(words, [reference_grammar(schema)] * BATCH, width, eos)
    processors = LogitsProcessorList([processor])
    theirs = demo.model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, logits_processor=processors
    )
    options: dict[str, Any] = {"grammar": Grammar.json_schema(schema), "tokenizer": demo.tokenizer}
    options["max_new_tokens"] = NEW
    drafter = Merge([Lookahead(), GrammarDrafter()])
    same(generate(demo.model, ids, mask, **options).sequences, theirs, "plain")
    drafted = generate(demo.model, ids, mask, drafter=drafter, **options)
    same(drafted.sequences, theirs, "drafted")
    assert sum(stats.accepted for stats in drafted.stats.requests) > 0
    drawn = {"do_sample": True, "temperature": 1.3, "top_p": 0.98, "seed": batch}
    sampled = [
        generate(demo.model, ids, mask, drafter=one, **drawn, **options).sequences
        for one in (None, Merge([Lookahead(), GrammarDrafter()]))
    ]
    same(sampled[1], sampled[0], "sampled")
    for rows in (theirs, sampled[0]):
        for text in demo.tokenizer.batch_decode(rows[:, width:], skip_special_tokens=True):
            jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
