"""`draftree bench quick`, and the parts that measure for `draftree tune`, the demo and the benchmarks of a checkout.

Methods (`methods`) answer the same prompts in turns, in one process, by the same clock (`measure`). Figures are made of
the samples afterwards (`summary`, `shares`) and end as tables of plain values (`report`).
"""
