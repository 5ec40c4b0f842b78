"""Measurements: methods side by side on the same prompts, in one process, by the same clock."""
