"""Experiments named after the papers' tables and figures: what the papers print, and what is measured here."""
