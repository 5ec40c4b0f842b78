"""Experiments on drafters: what they draft, what is accepted of it, and what it costs."""
