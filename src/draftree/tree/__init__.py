"""Floor 0: the token tree, which every other room uses and which imports none of them."""

from draftree.tree.structure import Draft
from draftree.tree.token_tree import TokenTree
