"""Loading a model by name, and putting a prompt into its tokens, as the command line and measurements do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def load_model(name: str | None) -> tuple[Any, Any]:
    """(model, tokenizer) of a folder or hub name; the embedded model where there is none.

    Raises:
        ValueError: a folder that does not exist or cannot be loaded.
    """
    if name is None:
        from draftree.demo_model import demo_model

        return demo_model()
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    folder = known_folder(name)
    tokenizer = load_tokenizer(name)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder)
    except ValueError:
        model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    return model.eval(), tokenizer


def load_tokenizer(name: str | None) -> Any:
    """The tokenizer of a folder or hub name; the embedded model's where there is none.

    Raises:
        ValueError: a folder that does not exist, or one without a tokenizer.
    """
    from transformers import AutoTokenizer

    if name is None:
        from draftree.demo_model import embedded

        with embedded("chat_4m") as folder:
            return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    path = known_folder(name)
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:  # in paragraphs
        if Path(path).is_dir():
            advice = "save the model's tokenizer there too"
        else:
            advice = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(f"No tokenizer could be loaded from {name!r}: {advice}.") from error


def known_folder(name: str) -> str:
    """A folder with a model in it, or what must be a hub name.

    Raises:
        ValueError: a folder that is not there, a file, or a folder without a model.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not any((folder / config).is_file() for config in ("config.json", "adapter_config.json")):
            raise ValueError(f"The folder {name!r} has no config.json: give one that a model was saved into.")
        return str(folder)
    if name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1 or folder.exists():
        raise ValueError(f"There is no model folder {name!r}: give a folder with a config.json, or a hub name.")
    return name


def encode_prompt(
    tokenizer: Any,
    prompt: str,
    *,
    raw: bool = False,
    history: Sequence[tuple[str, str]] = (),
    system: str | None = None,
) -> list[int]:
    """Token ids of a prompt: through the chat template where the tokenizer has one (and `raw` is false).

    `history` is what user and model said before, oldest first; without a template it stands above, line by line.
    `system` is a system message for the template.
    """
    if not raw and getattr(tokenizer, "chat_template", None):
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages += [
            {"role": role, "content": text}
            for turn in history
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        messages.append({"role": "user", "content": prompt})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return ids
    ids = tokenizer("\n".join([*(text for turn in history for text in turn), prompt])).input_ids
    return ids
