"""`draftree bench quick`, and parts of the demo and of the benchmarks of a checkout.

Methods (`methods`) answer the same prompts in turns, in one process (`measure`). Their samples become figures
(`summary`, `shares`) in tables of plain values (`report`).
"""
