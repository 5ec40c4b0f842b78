"""`draftree tune`: measure drafters and tree sizes on a user's own prompts and keep the fastest."""
