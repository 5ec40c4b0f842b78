"""Measurements of a user's own machine and model: `draftree bench quick`, `compare`, `speed` and `gpu`.

Methods answer the same prompts in turns, in one process, by the same clock (`measure`, `methods`, `kit`); figures are
made of the samples afterwards (`summary`); `case` is one model, batch size and way of choosing tokens. `steps` times
passes by their rows. Experiments on draftree itself lie in `benchmarks/` of a checkout, which `checkout` finds.
"""
