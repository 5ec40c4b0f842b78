"""Drafters: one file (or one small package) each."""

from draftree.drafting.base import Attachment, Context, Drafter, Step
from draftree.drafting.lookahead import Lookahead
from draftree.drafting.prompt_lookup import PromptLookup

__all__ = ["Attachment", "Context", "Drafter", "Lookahead", "PromptLookup", "Step"]
