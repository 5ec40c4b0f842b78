"""Measurements of a user's own machine and model: `draftree bench quick`, `compare` and `speed`.

`inputs` is what is given: a model, prompts and settings. Methods (`methods`, by name in `kit`) answer the same prompts
in turns, in one process, by the same clock (`measure`); figures are made of the samples afterwards (`summary`). `case`
is one model, batch size and way of choosing tokens, and `case_report` what people see of it. `steps` times passes by
their rows. Every measurement ends as tables of plain values (`report`), in the form of the experiments' result files.
Experiments, inflated models and `draftree bench gpu` lie in `benchmarks/` of a checkout, which `checkout` finds.
"""
