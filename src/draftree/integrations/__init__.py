"""Ways into draftree from other libraries."""

from draftree.integrations.custom_generate import custom_generate
