"""Placement of a model's weights: device, type, quantisation, and free memory."""

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
SMALL = 2_000_000_000  # Parameters below which a CPU computes 16-bit models in float32.
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
    """

    device: str = "auto"
    dtype: str = "auto"
    device_map: str | None = None
    quantize: str | None = None

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
        """Refuse impossible placements before a model is loaded.

        Raises:
            ValueError: no such device or type, or a device beside a map.
        """
        import torch

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
        if self.device == "auto":
            return
        try:
            torch.empty(0, dtype=torch.float32, device=self.device)
        except (RuntimeError, AssertionError):  # Torch without CUDA raises an AssertionError.
            raise ValueError(f"There is no device {self.device!r} here: give cpu, cuda, cuda:1, mps or auto.") from None

    def put(self, model: Any, report: Callable[[str], None]) -> Any:
        """Move `model` to the device and type; quantised models and those on several devices stay.

        Args:
            model: as loaded.
            report: receives a sentence if the type is not the stored one.
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
    for folder, limit, used, pages in (
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        group = CONTROL_GROUP / folder
        try:
            facts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            held = int((group / used).read_text()) - int(facts[pages])
            return max(0, int((group / limit).read_text()) - held)
        except (OSError, KeyError, ValueError):  # Another version of control groups, or no limit ("max").
            continue
    return None
