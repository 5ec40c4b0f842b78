"""Where a model's weights go: device, type, quantisation, and how much memory is free there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from draftree.errors import did_you_mean, install

DTYPES = ("auto", "float32", "bfloat16", "float16")
BLOCKS = ("q4_0", "q8_0")
QUANTIZED = (*BLOCKS, "int8")
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
        quantize: keeps weights in fewer bits, with which texts are those of another model; None for none. "q4_0" and
            "q8_0" put all weights into blocks of GGUF files, computed with in float32 on a CPU (needs gguf). "int8"
            keeps the layers' in 8 bits by torchao, computed with in the model's type (needs torchao and accelerate).
    """

    device: str = "auto"
    dtype: str = "auto"
    device_map: str | None = None
    quantize: str | None = None

    @property
    def blocks(self) -> str | None:
        """The format of blocks that weights are to be put into, such as "Q4_0"; None for none."""
        return self.quantize.upper() if self.quantize in BLOCKS else None

    @property
    def keeps_blocks(self) -> bool:
        """Whether the weights of a GGUF file can stay in their blocks there: on the CPU, computed in float32."""
        device = best_device() if self.device == "auto" else self.device
        return device == "cpu" and self.device_map is None and self.dtype in ("auto", "float32")

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
    """Return the device that "auto" stands for."""
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
