"""Traces: what a run did at every step, kept in a file, told as counts, and shown on a page."""
