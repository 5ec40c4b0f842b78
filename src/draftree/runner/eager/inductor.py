"""Layers of recorded passes compiled by torch's inductor: for types and devices that the C library has nothing for.

What lies between a layer's products becomes a few fused loops. Layers of one structure share their code, of which
weights are arguments, so a number of rows is compiled once for a whole model; attention stays as it is, and with it all
that depends on the length of the context. Functions are traced and handed to inductor without dynamo, whose guards
would cost as much as the loops save: what they guard is in the keys here.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from draftree.runner.eager.layer import Angles, TensorLayer
from draftree.runner.layout.skip import Omitted

COMPILERS = ("g++", "clang++", "c++")
Half = Callable[..., Any]


def check_compiler(device: torch.device) -> None:
    """Refuse a machine on which inductor cannot work.

    Raises:
        ValueError: such a one.
    """
    if device.type == "cpu" and not any(map(shutil.which, _compilers())):
        raise ValueError(
            "compile=True on a CPU needs a C++ compiler, and there is none on this machine: install g++, or leave "
            "compile out."
        )
    if device.type == "cuda":
        try:
            import triton  # noqa: F401
        except ImportError:
            raise ValueError(
                "compile=True on CUDA needs Triton, which is not installed: install torch's build for CUDA, or leave "
                "compile out."
            ) from None


def _compilers() -> Sequence[str]:
    from torch._inductor import config

    asked = config.cpp.cxx
    return [name for name in (asked if isinstance(asked, tuple | list) else [asked]) if name] + list(COMPILERS)


class InductorLayer(TensorLayer):
    """A layer in tensor operations whose halves are compiled, by the shapes of what they are given.

    Args:
        layer: as it is.
        known: compiled halves, shared by the layers of a model.
    """

    def __init__(self, layer: TensorLayer, known: dict[Any, Any]) -> None:
        self.__dict__.update(layer.__dict__)
        self._plain, self._known = layer, known
        norms = tuple(None if norm is None else norm.epsilon for norm in self.parts.every_norm())
        shapes = tuple((t.shape, t.stride(), t.dtype) for t in layer.tensors())
        # All that the code of a half depends on, but for the shapes of rows.
        structure = self.parts.heads, self.parts.wide, self.parts.activation, self.omitted, norms, shapes
        self._structure = known.setdefault(structure, structure)  # one object for layers that are alike

    def without(self, parts: Omitted) -> TensorLayer:
        """See `TensorLayer.without`."""
        return InductorLayer(self._plain.without(parts), self._known)

    def project(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """See `TensorLayer.project`."""
        query, key, value = self._half("project", angles, x, angles.cosine, angles.sine)
        return query, key, value

    def leave(self, x: Tensor, mixed: Tensor | None, angles: Angles) -> Tensor:
        """See `TensorLayer.leave`."""
        if mixed is None:
            return self._plain.leave(x, mixed, angles)
        out: Tensor = self._half("leave", angles, x, mixed)[0]
        return out

    def _half(self, name: str, angles: Angles, *rows: Tensor) -> Any:
        tensors = self._plain.tensors()
        key = name, id(self._structure), rows[0].shape, rows[1].stride()
        half = self._known.get(key)
        if half is None:
            half = self._known[key] = self._compiled(name, angles, rows, tensors)
        return half(*rows, *tensors)

    def _compiled(self, name: str, angles: Angles, rows: Sequence[Tensor], tensors: Sequence[Tensor]) -> Half:
        plain, rotation = self._plain, angles.rotation

        def project(x: Tensor, cosine: Tensor, sine: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
            return plain.using(given).project(x, Angles(cosine, sine, None, rotation))

        def leave(x: Tensor, mixed: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
            return (plain.using(given).leave(x, mixed, angles),)

        from torch._inductor import compile as compiled_by_inductor

        with torch.inference_mode(False), torch.no_grad():
            like = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in (*rows, *tensors)]
            half: Any = compiled_by_inductor(make_fx(project if name == "project" else leave)(*like), like)  # type: ignore[arg-type]
        return half
