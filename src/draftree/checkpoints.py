"""Find checkpoints by name (folders, GGUF files, the Hugging Face hub) and load them by transformers."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from draftree.errors import brief


def is_gguf(name: str) -> bool:
    """Return whether a model's name is a GGUF file's."""
    return name.lower().endswith(".gguf")


def pretrained(source: str | os.PathLike[str], **options: Any) -> Any:
    """Load a model by transformers, and refuse a checkpoint with missing weights.

    Args:
        source: a folder, or a hub name.
        options: of `from_pretrained`.

    Raises:
        ValueError: weights are missing (transformers would initialise them at random) or unreadable.
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
            f"{os.fspath(source)!r} lacks weights of {type(model).__name__}: {', '.join(missing[:3])}{more}: give a "
            "complete checkpoint."
        )
    return model


def _auto_class(source: str, gguf_file: str | None) -> Any:
    """Return transformers' class for a checkpoint: a decoder, an encoder-decoder, or a model for images and text.

    The configuration decides, because many encoder-decoders also have a class for their decoder alone, whose embeddings
    their checkpoints lack.
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


def known_folder(name: str) -> str:
    """Return a model's folder, GGUF file, or hub name.

    A GGUF file on the hub, `owner/name:file.gguf`, is downloaded if the cache does not have it.

    Raises:
        ValueError: no such folder, file or model on the hub, or a folder without a model.
    """
    folder = Path(name).expanduser()
    if is_gguf(name):
        if folder.is_file():
            return str(folder)
        repository, colon, file = name.rpartition(":")
        if not colon or "/" not in repository:
            raise ValueError(f"There is no GGUF file {name!r}: give one, or one on the hub, NAME:FILE.gguf.")
        return _file_on_hub(repository, file)
    if folder.is_dir():
        if not any((folder / config).is_file() for config in ("config.json", "adapter_config.json")):
            raise ValueError(f"The folder {name!r} has no config.json: give one that a model was saved into.")
        return str(folder)
    if name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1 or folder.exists():
        raise ValueError(
            f"There is no model folder {name!r}: give a folder with a config.json, a GGUF file, or a hub name."
        )
    return _on_hub(name)


def _file_on_hub(repository: str, file: str) -> str:
    """Return the path of a file of the Hugging Face hub in the cache; download it if necessary.

    Raises:
        ValueError: no such repository or file, or no connection.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError

    with suppress(HFValidationError):  # `_on_hub` explains it.
        cached = try_to_load_from_cache(repository, file)
        if isinstance(cached, str):
            return cached
    _on_hub(repository)
    try:
        return hf_hub_download(repository, file)
    except EntryNotFoundError as error:
        if isinstance(error, LocalEntryNotFoundError):
            raise ValueError(f"{file!r} of {repository!r} could not be downloaded: check the network.") from error
        raise ValueError(f"The model {repository!r} on the Hugging Face hub has no file {file!r}.") from error


def _on_hub(name: str) -> str:
    """Return `name` if the Hugging Face hub has this model; without a connection, its folder in the cache.

    One question is asked before loading: Hugging Face's loaders ask for several files and retry each, which takes most
    of a minute without a network.

    Raises:
        ValueError: the hub does not have it, or is not reached and the cache does not have it either.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
        return name
    except (EntryNotFoundError, GatedRepoError):  # An adapter, or a gated model: loading explains its terms.
        return name
    except (HFValidationError, RepositoryNotFoundError):
        raise ValueError(
            f"There is no folder {name!r}, and no such model on the Hugging Face hub, or a private one: "
            "check the spelling, or log in with hf auth login."
        ) from None
    except Exception as error:  # The type depends on the connection's library.
        for file in ("config.json", "adapter_config.json"):
            cached = try_to_load_from_cache(name, file)
            if isinstance(cached, str):
                return str(Path(cached).parent)
        raise ValueError(
            f"There is no folder {name!r}, no model of this name was loaded before, and the Hugging Face hub is not "
            f"reached ({brief(error) or type(error).__name__}): give a folder, or check the spelling and the network."
        ) from None
