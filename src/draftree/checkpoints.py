"""Checkpoints by name (folders, GGUF files, the Hugging Face hub), loaded whole, and where their weights go."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from draftree.errors import brief, did_you_mean, install
from draftree.published import refuse_published

DTYPES = ("auto", "float32", "bfloat16", "float16")
BLOCKS = ("q4_0", "q8_0")
QUANTIZED = (*BLOCKS, "int8")
SMALL = 2_000_000_000  # Parameters below which a CPU computes 16-bit models in float32.
# Packages of PyPI by which transformers reads the usual quantised checkpoints, by `quant_method`.
READERS = {
    "awq": ("gptqmodel", "accelerate"),
    "bitsandbytes": ("bitsandbytes", "accelerate"),
    "compressed-tensors": ("compressed-tensors",),
    "gptq": ("gptqmodel", "optimum"),
    "quanto": ("optimum-quanto", "accelerate"),
    "torchao": ("torchao",),
}
CONTROL_GROUP = Path("/sys/fs/cgroup")  # The container's, inside of one.


@dataclass(frozen=True, slots=True)
class Placement:
    """Device and type of a model's weights.

    Attributes:
        device: of torch, such as "cuda:1"; "auto" for the best one.
        dtype: "float32", "bfloat16" or "float16"; "auto" for the stored type, except that a CPU computes small models
            (`SMALL`) in float32 if memory allows.
        device_map: Hugging Face's, such as "auto" over several devices (needs accelerate); None for one device.
        quantize: rounds weights to fewer bits, which makes another model; None for none. "q4_0" and "q8_0" put all
            weights into blocks of GGUF files, for float32 on a CPU (needs gguf). "int8" puts the layers' into 8 bits
            by torchao, for the model's type (needs torchao and accelerate).
        merge: merges an adapter (LoRA) into the weights, so that fast runners drive the model; False keeps it apart.
    """

    device: str = "auto"
    dtype: str = "auto"
    device_map: str | None = None
    quantize: str | None = None
    merge: bool = True

    @property
    def blocks(self) -> str | None:
        """Return the format of blocks for the weights, such as "Q4_0", or None."""
        return self.quantize.upper() if self.quantize in BLOCKS else None

    @property
    def keeps_blocks(self) -> bool:
        """Return whether weights can stay in blocks of GGUF files: on the CPU, computed in float32."""
        device = best_device() if self.device == "auto" else self.device
        return device == "cpu" and self.device_map is None and self.dtype in ("auto", "float32")

    def check(self) -> None:
        """Refuse impossible placements before a model is loaded."""
        if self.dtype not in DTYPES:
            hint = did_you_mean(self.dtype, DTYPES, 0.5)  # So that "fp16" finds float16.
            raise ValueError(f"dtype is {self.dtype!r}: choose {', '.join(DTYPES)}.{hint}")
        if self.quantize is not None:
            if self.quantize not in QUANTIZED:
                raise ValueError(f"quantize is {self.quantize!r}: give {', '.join(QUANTIZED)}, or leave it out.")
            if self.blocks:
                if find_spec("gguf") is None:
                    raise ValueError(f"Weights in blocks need the package gguf: {install('gguf')}.")
                if not self.keeps_blocks:
                    raise ValueError(
                        f"quantize={self.quantize!r} is computed in float32 on a CPU: leave dtype out, and give device "
                        "cpu, or quantize int8."
                    )
            elif find_spec("torchao") is None or find_spec("accelerate") is None:
                raise ValueError(f"Weights of 8 bits need torchao and accelerate: {install('quantize')}.")
        if self.device_map is not None:
            if self.device != "auto":
                raise ValueError("device and device_map exclude each other: give one of them.")
            if find_spec("accelerate") is None:
                raise ValueError("A device_map needs accelerate: pip install accelerate.")
            return
        if self.device in ("auto", "cpu"):
            return
        import torch  # This takes a second, and is done after the other checks.

        try:
            torch.empty(0, dtype=torch.float32, device=self.device)
        except (RuntimeError, AssertionError):  # Torch without CUDA raises an AssertionError.
            raise ValueError(f"There is no device {self.device!r} here: give cpu, or auto for the best.") from None

    def put(self, model: Any, report: Callable[[str], None]) -> Any:
        """Move `model` to the device and type; quantised models and those on several devices stay."""
        import torch

        if self.device_map is not None:
            return model
        if self.quantize is None and getattr(model, "hf_quantizer", None) is not None:
            return model
        model = model.to(torch.device(best_device() if self.device == "auto" else self.device))
        if self.quantize is not None:
            return model
        stored = model.dtype
        if self.dtype == "auto":
            if model.device.type == "cpu" and stored in (torch.float16, torch.bfloat16):
                size, free = model.num_parameters(), free_bytes(model.device)
                if size < SMALL and (free is None or 6 * size < free):  # Both exist while copying.
                    name = str(stored).removeprefix("torch.")
                    report(
                        f"The weights are stored in {name} and are computed in float32, in which no text changes: "
                        f"--dtype {name} computes as they are stored, which takes less memory."
                    )
                    return model.to(dtype=torch.float32)
            return model
        dtype = getattr(torch, self.dtype)
        if dtype != stored:  # Only the embedded model. Buffers keep their type, as in Hugging Face's loader.
            for parameter in model.parameters():
                parameter.data = parameter.data.to(dtype)
        return model


def best_device() -> str:
    """Return the device that "auto" stands for."""
    import torch

    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def free_bytes(device: Any) -> int | None:
    """Return the free bytes of a torch device; None if the system does not report them."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    try:
        facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(facts["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    left = _left_in_container()
    return free if left is None else min(free, left)


def _left_in_container() -> int | None:
    """Return the free bytes below the limit of this container (Linux's control group); None without a limit.

    Inactive pages of files count as free, because the kernel reclaims them.
    """
    try:
        facts = dict(line.split() for line in (CONTROL_GROUP / "memory.stat").read_text().splitlines())
        held = int((CONTROL_GROUP / "memory.current").read_text()) - int(facts["inactive_file"])
        return max(0, int((CONTROL_GROUP / "memory.max").read_text()) - held)
    except (OSError, KeyError, ValueError):  # No control group of version 2, or no limit ("max").
        return None


def is_gguf(name: str) -> bool:
    """Return whether a model's name is a GGUF file's."""
    return name.lower().endswith(".gguf")


def pretrained(source: str | os.PathLike[str], **options: Any) -> Any:
    """Load a model by transformers, and refuse a checkpoint with missing weights."""
    from safetensors import SafetensorError

    name = os.fspath(source)
    check_packages(name)
    try:
        kind, config = _auto_class(name, options.get("gguf_file"))
        if _packed_weights_alone(config):
            config.quantization_config["dequantize"] = True  # Otherwise the first pass does it, behind hooks.
            options["config"] = config
        model, found = kind.from_pretrained(source, output_loading_info=True, **options)
    except SafetensorError as error:
        raise ValueError(
            f"The weights of {name!r} cannot be read ({brief(error)}): copy or download the model again."
        ) from error
    except (ImportError, RuntimeError) as error:  # A package or device that is missing, or tensors of other shapes.
        if "memory" in str(error):
            raise
        raise ValueError(f"transformers cannot load {name!r} here: {brief(error)}.") from error
    missing = sorted(found["missing_keys"])
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(
            f"{name!r} lacks weights of {type(model).__name__}: {', '.join(missing[:3])}{more}: give a "
            "complete checkpoint."
        )
    return model


def _packed_weights_alone(config: Any) -> bool:
    """Return whether a checkpoint's weights are packed by compressed-tensors and its activations are not rounded."""
    held = getattr(config, "quantization_config", None)
    if not isinstance(held, dict) or held.get("quant_method") != "compressed-tensors":
        return False
    return all(group.get("input_activations") is None for group in held.get("config_groups", {}).values())


def check_packages(name: str) -> None:
    """Refuse a model folder that needs a package which is not installed; torch is not imported for it."""
    folder = Path(name)
    if (folder / "adapter_config.json").is_file() and find_spec("peft") is None:
        raise ValueError(f"The folder {name!r} holds an adapter (LoRA): pip install peft, or give the merged model.")
    missing: list[str] = []
    with suppress(OSError, ValueError, AttributeError):  # Hub names, and files that transformers explains.
        found = json.loads((folder / "config.json").read_text("utf-8")).get("quantization_config") or {}
        method = found.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in found else "")
        missing = [package for package in READERS.get(method, ()) if not _installed(package)]
    if missing:
        raise ValueError(f"The weights of {name!r} are quantised by {method}: pip install {' '.join(missing)}.")


def _installed(package: str) -> bool:
    """Return whether a package of PyPI is installed."""
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def _auto_class(source: str, gguf_file: str | None) -> tuple[Any, Any]:
    """Return transformers' auto class for a checkpoint, and its configuration.

    The class is of decoders, of encoder-decoders, or of models with more inputs than text. The configuration decides,
    because many encoder-decoders also have a class for their decoder alone, whose embeddings their checkpoints lack.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM

    base = None if gguf_file else adapted_model(source)
    config = AutoConfig.from_pretrained(base or source, gguf_file=gguf_file)
    kinds: list[Any] = [AutoModelForCausalLM, AutoModelForMultimodalLM]
    kinds.insert(0 if getattr(config, "is_encoder_decoder", False) else 2, AutoModelForSeq2SeqLM)
    return next((kind for kind in kinds if type(config) in kind._model_mapping), AutoModelForCausalLM), config


def adapted_model(source: str) -> str | None:
    """Return the name of an adapter's base model; None for what is no adapter."""
    from transformers.utils import find_adapter_config_file

    adapter = find_adapter_config_file(source)
    return None if adapter is None else str(json.loads(Path(adapter).read_text("utf-8"))["base_model_name_or_path"])


def known_folder(name: str) -> str:
    """Return a model's folder, GGUF file, or hub name.

    A GGUF file on the hub, `owner/name:file.gguf`, is downloaded if the cache does not have it.
    """
    folder = Path(name).expanduser()
    if is_gguf(name):
        if folder.is_file():
            with folder.open("rb") as opened:
                if opened.read(4) != b"GGUF":
                    raise ValueError(f"{name!r} does not begin as a GGUF file: copy or download it again.")
            return str(folder)
        repository, colon, file = name.rpartition(":")
        if not colon or "/" not in repository:
            raise ValueError(f"There is no GGUF file {name!r}: give one, or one on the hub, NAME:FILE.gguf.")
        return _file_on_hub(repository, file)
    if folder.is_dir():
        if not any((folder / config).is_file() for config in ("config.json", "adapter_config.json")):
            raise ValueError(f"The folder {name!r} has no config.json: give one that a model was saved into.")
        refuse_published(folder)
        check_packages(str(folder))
        return str(folder)
    if name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1 or folder.exists():
        raise ValueError(
            f"There is no model folder {name!r}: give a folder with a config.json, a GGUF file, or a hub name."
        )
    return _on_hub(name)


def _file_on_hub(repository: str, file: str) -> str:
    """Return the path of a file of the Hugging Face hub in the cache; download it if necessary."""
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


@cache
def _on_hub(name: str) -> str:
    """Return `name` if the Hugging Face hub has this model; without a connection, its folder in the cache.

    One question is asked before loading: Hugging Face's loaders ask for several files and retry each, which takes most
    of a minute without a network.
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
