"""Published drafters: EAGLE-3, DFlash and their kin, and MTP, which read the target's hidden states."""

from draftree.drafting.published.load import load_published
from draftree.drafting.published.mtp import load_mtp

__all__ = ["load_mtp", "load_published"]
