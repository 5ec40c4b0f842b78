"""What several verbs share: loading a model, choosing a drafter, colouring text by who guessed it."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from rich.text import Text

GUESS_STYLES = {
    "prompt_lookup": "green",
    "lookahead": "green",
    "lookahead/prompt": "cyan",
    "lookahead/output": "green",
    "lookahead/both": "bold green",
}
LEGEND = "plain: the model's own token; green: guessed from earlier answers; cyan: guessed from the prompt"
DRAFTERS = ("none", "lookahead", "prompt-lookup")


def load_model(name: str | None) -> tuple[Any, Any]:
    """(model, tokenizer) of a folder or hub name; the embedded model where there is none.

    Raises:
        ValueError: a folder that does not exist or cannot be loaded.
    """
    if name is None:
        from draftree import demo_model

        return demo_model()
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    if (name.startswith((".", "/", "~")) or "\\" in name) and not Path(name).expanduser().is_dir():
        raise ValueError(f"There is no model folder {name!r}: give a folder with a config.json, or a hub name.")
    folder = str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder)
    except ValueError:
        model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    return model.eval(), tokenizer


def make_drafter(name: str, tokenizer: Any, *, trie: Path | None = None) -> Any:
    """The drafter called `name` on the command line; `trie` is a saved trie for Lookahead.

    Raises:
        ValueError: no such drafter, or an option that does not belong to it.
    """
    from draftree.drafting import Lookahead, PromptLookup

    if name not in DRAFTERS:
        near = difflib.get_close_matches(name, DRAFTERS, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"There is no drafter {name!r}: choose {', '.join(DRAFTERS)}.{hint}")
    if trie is not None and name != "lookahead":
        raise ValueError(f"--trie belongs to the lookahead drafter, not to {name!r}: leave one of them out.")
    if name == "lookahead":
        if trie is not None and trie.exists():
            return Lookahead.load(trie, tokenizer)
        return Lookahead()
    return PromptLookup() if name == "prompt-lookup" else None


def encode_prompt(tokenizer: Any, prompt: str, *, raw: bool = False) -> list[int]:
    """Token ids of a prompt: through the chat template where the tokenizer has one (and `raw` is false)."""
    if not raw and getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return ids
    ids = tokenizer(prompt).input_ids
    return ids


class ColouredText:
    """Grows a rich Text token by token; bytes of unfinished characters wait for the rest of theirs."""

    def __init__(self, tokenizer: Any) -> None:
        self.text = Text()
        self._tokenizer = tokenizer
        self._pending: list[int] = []

    def add(self, token: int, source: str | None) -> Text:
        """Append a token in its source's colour; returns the piece of text that became printable."""
        self._pending.append(token)
        piece = self._tokenizer.decode(self._pending, skip_special_tokens=True)
        if piece.endswith("\ufffd") and len(self._pending) < 8:
            return Text()
        self._pending.clear()
        coloured = Text(piece, style=GUESS_STYLES.get(source or "", "") if source else "")
        self.text.append_text(coloured)
        return coloured
