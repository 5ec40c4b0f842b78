"""A simulated device, for tests without a GPU: its tensors hold their numbers on the CPU.

Operations on them run on the CPU and return such tensors. Mixing them with tensors of the CPU fails as it does on a
GPU. Copies are counted, and operations in which Python would wait for a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

FAR = torch.device("maia", 0)  # a device type that torch names without asking for its driver
WAITS = ("item", "tolist", "nonzero", "unique", "masked_select", "equal", "__bool__", "__int__", "__float__")
BESIDE = ("__getitem__", "__setitem__", "copy_", "to", "cpu", "index_put_")  # take tensors of the CPU as well


class FarTensor(Tensor):
    """A tensor on the device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> FarTensor:
        made = Tensor._make_wrapper_subclass(cls, held.shape, strides=held.stride(), dtype=held.dtype, device=FAR)
        made.held = held
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _do(func, args, kwargs or {}, None)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} got past Python with a tensor of the device")


class FarDevice(TorchFunctionMode):
    """While it is entered, tensors can be made on the device, and copies and waits are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _do(func, args, kwargs or {}, self.seen)


def _do(func: Callable[..., Any], args: Any, kwargs: dict[str, Any], seen: Counter[str] | None) -> Any:
    name = getattr(func, "__name__", "")
    tensors = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    far = [t for t in tensors if isinstance(t, FarTensor)]
    if name == "__get__" and far and func.__self__.__name__ not in ("T", "mT"):  # type: ignore[attr-defined]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    asked = [d for d in (*args[1:2], kwargs.get("device")) if isinstance(d, torch.device)] if name != "device" else []
    if not far and not any(d == FAR for d in asked):
        return func(*args, **kwargs)
    if name in WAITS or (name == "__getitem__" and any(t.dtype == torch.bool for t in tensors[1:])):
        _count(seen, f"wait: {name}")
    if name not in BESIDE and any(t.dim() for t in tensors if not isinstance(t, FarTensor)):
        raise RuntimeError(f"{name}: tensors on two devices, {[(type(t).__name__, tuple(t.shape)) for t in tensors]}")

    def near(leaf: Any) -> Any:
        if isinstance(leaf, FarTensor):
            return leaf.held
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    given, options = _mapped(near, (args, kwargs))
    out = func(*given, **options)
    if name == "copy_":
        if isinstance(args[0], FarTensor) != isinstance(args[1], FarTensor):
            _count(seen, "to device" if isinstance(args[0], FarTensor) else "to_cpu")
        return args[0]
    to_far = asked[-1] == FAR if asked else name != "cpu"
    if far and not to_far:
        _count(seen, "to_cpu")
    if not far and (name == "to" if tensors else name in ("tensor", "as_tensor")):
        _count(seen, "to device")

    def back(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not to_far:
            return leaf
        same = [t for t in far if t.held is leaf]  # done in place
        return same[0] if same else FarTensor(leaf)

    return _mapped(back, out)


def _leaves(nested: Any) -> Iterator[Any]:
    """Yield the parts of tuples, lists and dictionaries. Torch's own functions for this are much slower."""
    if isinstance(nested, (tuple, list, dict)):
        for part in nested.values() if isinstance(nested, dict) else nested:
            yield from _leaves(part)
    else:
        yield nested


def _mapped(change: Callable[[Any], Any], nested: Any) -> Any:
    """Change the parts of tuples, lists and dictionaries."""
    if isinstance(nested, dict):
        return {name: _mapped(change, part) for name, part in nested.items()}
    if isinstance(nested, (tuple, list)) and not isinstance(nested, torch.Size):
        return type(nested)([_mapped(change, part) for part in nested])
    return change(nested)


def _count(seen: Counter[str] | None, what: str) -> None:
    if seen is None:
        raise RuntimeError(f"A tensor of the device outside FarDevice(): {what}.")
    seen[what] += 1


def moved(model: Any) -> Any:
    """Move a model's parameters and buffers to the device."""
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None:
                module._parameters[name] = nn.Parameter(FarTensor(weight.detach()), requires_grad=False)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = FarTensor(buffer)
    return model
