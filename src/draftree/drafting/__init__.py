"""Drafters: one file (or one small package) each."""

from draftree.drafting.base import Attachment, Drafter, RequestState, Step
from draftree.drafting.bild import BiLD
from draftree.drafting.bita import BiTA
from draftree.drafting.draft_model import DraftModel
from draftree.drafting.hidden_transfer import HiddenTransfer
from draftree.drafting.lookahead import Lookahead
from draftree.drafting.medusa import Medusa
from draftree.drafting.merge import Merge
from draftree.drafting.prompt_lookup import GrammarDrafter, PromptLookup
