"""Encode prompts: texts, messages and dialogues into token ids, by a tokenizer and its chat template."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeGuard

from draftree.errors import brief


def encode_prompt(
    tokenizer: Any,
    prompt: str,
    *,
    raw: bool = False,
    history: Sequence[tuple[str, str]] = (),
    system: str | None = None,
) -> list[int]:
    """Return the token ids of a prompt, by the tokenizer's chat template if it has one.

    Args:
        tokenizer: Hugging Face's.
        prompt: the user's message.
        raw: True omits the template.
        history: earlier messages of user and model, oldest first; without a template, they precede the prompt as lines.
        system: system message for the template.
    """
    if not raw and getattr(tokenizer, "chat_template", None):
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages += [
            {"role": role, "content": text}
            for turn in history
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        return encode_dialogue(tokenizer, [*messages, {"role": "user", "content": prompt}])
    if system is not None:
        raise ValueError("The tokenizer has no chat template, which a system message needs: put it into the prompt.")
    ids: list[int] = tokenizer("\n".join([*(text for turn in history for text in turn), prompt])).input_ids
    return ids


def encode_dialogue(tokenizer: Any, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
    """Return the token ids of a dialogue, by the tokenizer's chat template."""
    from jinja2 import TemplateError

    try:
        return encode_messages(tokenizer, messages, **options)
    except TemplateError as error:
        raise ValueError(f"The model's chat template refuses these messages: {brief(error)}.") from error


def encode_messages(
    tokenizer: Any, messages: Sequence[dict[str, Any]], check: Callable[[str], None] = lambda text: None, **options: Any
) -> list[int]:
    """Return the token ids of a chat, by the tokenizer's template.

    Args:
        tokenizer: Hugging Face's, with a chat template.
        messages: the chat; a content is a text or a list of parts, and the template gets the form that it reads.
        check: receives the template's text before it is tokenised, and may raise.
        options: of the template, such as `tools`.

    Raises:
        Exception: of the template, for messages that it does not take, or of `check`.
    """
    form = as_parts if _reads_parts(tokenizer.get_chat_template(tools=options.get("tools"))) else as_text
    given = [one | {"content": form(one["content"])} if one.get("content") is not None else one for one in messages]
    text = tokenizer.apply_chat_template(given, tokenize=False, **{"add_generation_prompt": True, **options})
    check(text)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


MOST_PIXELS = 50_000_000  # of an image; a file of some kilobytes may unpack to many more


def open_image(image: Any) -> Any:
    """Return an image of PIL from a file's path or its bytes, or from such an image.

    Raises:
        ValueError: pillow is absent, the data is no image, or it has more than `MOST_PIXELS` pixels.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError("Images need the package pillow: pip install pillow.") from error
    try:
        read = io.BytesIO(image) if isinstance(image, bytes) else image
        opened = read if isinstance(read, Image.Image) else Image.open(read)
        pixels = opened.width * opened.height
        if pixels <= MOST_PIXELS:
            return opened.convert("RGB")
    except (OSError, SyntaxError, ValueError, AttributeError, Image.DecompressionBombError) as error:
        raise ValueError(f"An image cannot be read ({brief(error)}): give a PNG or JPEG file that is whole.") from error
    raise ValueError(f"An image has {pixels} pixels, and at most {MOST_PIXELS} are read: make it smaller.")


def seen_content(text: str, images: Sequence[Any]) -> str | list[dict[str, Any]]:
    """Return a message's content: images, as `open_image` takes them, before a text."""
    seen = [{"type": "image", "image": open_image(image)} for image in images]
    return [*seen, {"type": "text", "text": text}] if seen else text


def encode_seen(
    tokenizer: Any, messages: Sequence[dict[str, Any]], **options: Any
) -> tuple[list[int], dict[str, Any] | None]:
    """Return the token ids of a dialogue, and the image tensors of a processor; None for a dialogue of text alone.

    Args:
        tokenizer: the model's; its processor comes from the same folder.
        messages: the dialogue; a part {"type": "image", "image": ...} of a content has what `open_image` returns.
        options: of the template, such as `tools`.

    Raises:
        ValueError: there is no processor, or it refuses the messages.
    """
    parts = [part for one in messages for part in as_parts(one.get("content") or "")]
    if all(part["type"] != "image" for part in parts):
        return encode_dialogue(tokenizer, messages, **options), None
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(tokenizer.name_or_path)
    except Exception as error:  # Missing files and packages raise different errors.
        if "torchvision" in str(error).lower():
            raise ValueError("This model's processor needs torchvision: pip install torchvision.") from error
        raise ValueError(f"The model's processor of images cannot be loaded ({brief(error)}).") from error
    if not hasattr(processor, "image_processor"):
        raise ValueError("The model's folder has no processor of images: leave images out.")
    given = [one | {"content": as_parts(one.get("content") or "")} for one in messages]
    options = {"add_generation_prompt": True, "chat_template": tokenizer.chat_template} | options
    try:
        made = processor.apply_chat_template(given, tokenize=True, return_dict=True, return_tensors="pt", **options)
    except Exception as error:  # Templates and processors may raise anything.
        raise ValueError(f"The model's processor refuses these messages: {brief(error)}.") from error
    return made["input_ids"][0].tolist(), dict(made)


def as_text(content: str | list[dict[str, Any]]) -> str:
    """Return a message's content as one text."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def as_parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a message's content as a list of parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


@lru_cache
def _reads_parts(template: str) -> bool:
    """Return True if a chat template shows parts of contents and loses texts, as those of some vision models do."""
    from transformers.utils.chat_template_utils import render_jinja_template

    for form in (as_text, as_parts):
        try:
            text = render_jinja_template([[{"role": "user", "content": form("a-mark")}]], chat_template=template)[0][0]
        except Exception:  # Templates may raise anything.
            continue
        if "a-mark" in text:
            return form is as_parts
    return False


def is_text(prompts: Any) -> TypeGuard[str | Sequence[str]]:
    """Return whether prompts are a text or a list of texts."""
    listed = isinstance(prompts, list | tuple) and len(prompts) > 0
    return isinstance(prompts, str) or (listed and all(isinstance(one, str) for one in prompts))


def encode_texts(tokenizer: Any, prompts: str | Sequence[str], mask: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ids and the mask of texts [batch, length], padded on the left; see `encode_prompt`."""
    if tokenizer is None:
        raise ValueError("The prompt is text, which needs the model's tokenizer: pass tokenizer=.")
    if mask is not None:
        raise ValueError("attention_mask belongs to token ids, and the prompt is text: leave it out.")
    texts = [prompts] if isinstance(prompts, str) else prompts
    if not all(text.strip() for text in texts):
        raise ValueError("The prompt is empty: give a text.")
    ids = [encode_prompt(tokenizer, text) for text in texts]
    width = max(map(len, ids))
    filler = getattr(tokenizer, "pad_token_id", None) or 0
    rows = [[filler] * (width - len(row)) + row for row in ids]
    return rows, [[0] * (width - len(row)) + [1] * len(row) for row in ids]
