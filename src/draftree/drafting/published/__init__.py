"""Published drafters: EAGLE-3, DFlash and their kin, and MTP, which read the target's hidden states."""

from draftree.drafting.published.load import load_published

__all__ = ["load_published"]
