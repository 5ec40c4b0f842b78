"""Traces: what a run did at every step, kept in a file, summed up as counts, and shown on a page."""
