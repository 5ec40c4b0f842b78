"""Lookahead: drafts from a trie of earlier prompts and outputs (arXiv 2312.12728)."""

from draftree.drafting.lookahead.drafter import Lookahead
from draftree.drafting.lookahead.trie import Trie
