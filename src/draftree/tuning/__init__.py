"""`draftree tune`: measure drafters and tree sizes on a user's own prompts and keep the fastest.

`file` reads and writes the choice, `candidates` lists and runs the candidates, `search` halves them.
"""
