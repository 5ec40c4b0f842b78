"""Loading a model by name, and putting a prompt into its tokens, as the command line and measurements do."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from draftree.errors import brief, did_you_mean, install

DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZED = ("int8",)
SMALL = 2_000_000_000  # parameters below which a CPU computes in float32 what is stored in 16 bits
CONTROL_GROUP = Path("/sys/fs/cgroup")  # of the container, within one


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model's weights lie, and in which type.

    Attributes:
        device: of torch, such as "cuda:1"; "auto" for the best there is.
        dtype: "float32", "bfloat16" or "float16"; "auto" as they are stored, except that a CPU computes small models
            (`SMALL`) in float32 where the memory is there.
        device_map: Hugging Face's, such as "auto" over several devices (needs accelerate); None for one device.
        quantize: "int8" keeps the weights of the layers' linears in 8 bits (torchao's, needs that and accelerate); they
            are computed with in the model's type. It is another model that drafts and texts are then of. None for none.
    """

    device: str = "auto"
    dtype: str = "auto"
    device_map: str | None = None
    quantize: str | None = None

    def check(self) -> None:
        """Refuse what cannot be, before a model is loaded.

        Raises:
            ValueError: no such device or type here, or a device beside a map.
        """
        import torch

        if self.dtype not in DTYPES:
            hint = did_you_mean(self.dtype, DTYPES, 0.5)  # fp16 is half of float16
            raise ValueError(f"dtype is {self.dtype!r}: choose {', '.join(DTYPES)}.{hint}")
        if self.quantize is not None:
            if self.quantize not in QUANTIZED:
                raise ValueError(f"quantize is {self.quantize!r}: give int8, or leave it out.")
            if find_spec("torchao") is None or find_spec("accelerate") is None:
                raise ValueError(f"Weights of 8 bits need torchao and accelerate: {install('quantize')}.")
        if self.device_map is not None:
            if self.device != "auto":
                raise ValueError("device and device_map both say where the weights go: give one of them.")
            if find_spec("accelerate") is None:
                raise ValueError("A device_map needs accelerate: pip install accelerate.")
            return
        if self.device == "auto":
            return
        try:
            device = torch.device(self.device)
        except RuntimeError:
            raise ValueError(f"There is no device {self.device!r}: give cpu, cuda, cuda:1, mps or auto.") from None
        counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
        if device.type not in counts:  # another kind, which this torch may know
            try:
                torch.empty(0, dtype=torch.float32, device=device)
                return
            except Exception:  # of whatever library it needs
                counts[device.type] = 0
        if (device.index or 0) >= counts[device.type]:
            there = [name for name, found in counts.items() if found]
            raise ValueError(f"This machine has no device {self.device!r}: give one of {', '.join(there)}, or auto.")

    def put(self, model: Any, report: Callable[[str], None]) -> Any:
        """`model` on the device and in the type; one that is quantised or spread keeps its own.

        Args:
            model: as it was loaded.
            report: is given a sentence where the type is not the one that is stored.
        """
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
                if size < SMALL and (free is None or 6 * size < free):  # what is stored stays until the copy is whole
                    name = str(stored).removeprefix("torch.")
                    report(
                        f"The weights are stored in {name} and are computed in float32, in which no text changes: "
                        f"--dtype {name} computes as they are stored, which takes less memory."
                    )
                    return model.to(dtype=torch.float32)
            return model
        dtype = getattr(torch, self.dtype)
        if dtype != stored:  # the embedded model, others were loaded so; buffers stay, as Hugging Face leaves them
            for parameter in model.parameters():
                parameter.data = parameter.data.to(dtype)
        return model


def best_device() -> str:
    """The device that "auto" stands for."""
    import torch

    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def free_bytes(device: Any) -> int | None:
    """Memory that a new tensor on a torch device may take; None where the system does not report it."""
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
    """Bytes up to the limit of the container (Linux's control group) that this process is in; None without a limit.

    Pages of files count as used there, though the kernel takes back those that are not in use before it ends a process.
    """
    for folder, limit, used, pages in (
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        group = CONTROL_GROUP / folder
        try:
            facts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            held = int((group / used).read_text()) - int(facts[pages])
            return max(0, int((group / limit).read_text()) - held)
        except (OSError, KeyError, ValueError):  # another version of control groups, or no limit ("max")
            continue
    return None


def load_model(
    name: str | None, placement: Placement | None = None, report: Callable[[str], None] = lambda line: None
) -> tuple[Any, Any]:
    """(model, tokenizer) of a folder or hub name; the embedded model where there is none.

    Args:
        name: of the model.
        placement: device and type; the defaults of `Placement` where there is none.
        report: is given a sentence about a type that is not the one that is stored.

    Raises:
        ValueError: a folder that does not exist or cannot be loaded, or a device or type that is not there.
    """
    placement = placement or Placement()
    placement.check()
    if name is None:
        from transformers import AutoTokenizer

        from draftree.demo_model import embedded

        with embedded("chat_4m") as folder:
            model = _loaded(str(folder), placement, "float32")
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    else:
        path = known_folder(name)
        if (Path(path) / "adapter_config.json").is_file() and find_spec("peft") is None:
            raise ValueError(
                f"The folder {name!r} holds an adapter (LoRA): pip install peft, or give the merged model."
            )
        tokenizer = _tokenizer(path, name)  # before the model, which takes long
        model = _loaded(path, placement, placement.dtype)
    return placement.put(model.eval(), report), tokenizer


def _loaded(name: str, placement: Placement, dtype: str) -> Any:
    """A model as Hugging Face loads it, quantised and spread already."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    given: dict[str, Any] = {"dtype": dtype}
    if placement.device_map is not None:
        given["device_map"] = placement.device_map
    if placement.quantize is not None:
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        given["quantization_config"] = TorchAoConfig(Int8WeightOnlyConfig())
    try:
        try:
            return AutoModelForCausalLM.from_pretrained(name, **given)
        except ValueError as error:
            if "AutoModelForCausalLM" not in str(error):  # it is one, and something else is wrong
                raise
            return AutoModelForSeq2SeqLM.from_pretrained(name, **given)
    except SafetensorError as error:
        raise ValueError(
            f"The weights of {name!r} cannot be read ({brief(error)}): copy or download the model again."
        ) from error


def _tokenizer(path: str, name: str) -> Any:
    """The tokenizer of what `known_folder` made of a name."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:  # in paragraphs
        if Path(path).is_dir():
            advice = "save the model's tokenizer there too"
        else:
            advice = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(f"No tokenizer could be loaded from {name!r}: {advice}.") from error


def known_folder(name: str) -> str:
    """A folder with a model in it, or the name of a model on the hub.

    Raises:
        ValueError: a folder that is not there, a file, a folder without a model, or no such model on the hub.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not any((folder / config).is_file() for config in ("config.json", "adapter_config.json")):
            raise ValueError(f"The folder {name!r} has no config.json: give one that a model was saved into.")
        return str(folder)
    if name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1 or folder.exists():
        raise ValueError(f"There is no model folder {name!r}: give a folder with a config.json, or a hub name.")
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


def encode_messages(tokenizer: Any, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
    """Token ids of a chat, through the tokenizer's template, which gets `options` as well.

    Raises:
        Exception: whatever the template raises where it does not take these messages.
    """
    text = tokenizer.apply_chat_template(messages, tokenize=False, **{"add_generation_prompt": True, **options})
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids
