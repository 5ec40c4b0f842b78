"""Whether a model's weights are still those that were copied: a checksum over all their bytes.

Runners that are faster than the model's own `forward` keep weights in a layout of their own. A model can be changed
behind them in ways that leave no trace on its tensors (fused optimizers, edits of `parameter.data`, views of NumPy), so
nothing less than the contents tells. Reading all of them takes about as long as one step of decoding.
"""

from __future__ import annotations

import functools
import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from draftree.native import load_library
from draftree.native.addresses import array_address
from draftree.runner.layout.positions import is_length_dependent

Span = tuple[int, int]  # a tensor's address and bytes
BLOCK_WORDS = 16384  # as in native/checksum.h
CHUNK, PIECE = 2**20, 2**23  # words of a sum, and most of all sums made at once, on other devices than the CPU


def weights_checksums(model: nn.Module, of: Callable[[Span], bool] | None = None) -> dict[Span, bytes]:
    """A checksum of each of a model's parameters and buffers, or of those at the places that `of` takes.

    Raises:
        ValueError: weights that are not in memory.
    """
    sums = {span: _sums_of(held) for span, held in _tensors(model).items() if of is None or of(span)}
    return {span: _digest([found]) for span, found in zip(sums, _fetched(list(sums.values())), strict=True)}


def span_of(tensor: Tensor) -> Span:
    """Where a contiguous tensor lies."""
    return tensor.data_ptr(), tensor.nbytes


def tensors_checksum(tensors: Iterable[Tensor]) -> bytes:
    """16 bytes that change with the tensors' contents; a change of a single number is never missed.

    Raises:
        ValueError: a tensor that is not in memory.
    """
    return _digest(_fetched([_sums_of(tensor) for tensor in tensors]))


def _digest(sums: Iterable[bytes]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for found in sums:
        digest.update(found)
    return digest.digest()


def _sums_of(tensor: Tensor) -> bytes | Tensor:
    """The sums of a tensor's words, on the device where it is one."""
    if tensor.is_meta:
        raise ValueError("The model's weights are offloaded, so they cannot be read: load the model into memory.")
    flat = tensor.detach().contiguous().view(-1)
    data = flat.view(torch.uint8) if flat.dtype != torch.bool else flat.byte()
    return _of_cpu(data.numpy()) if data.is_cpu else _of_device(data)


def _fetched(sums: Sequence[bytes | Tensor]) -> Iterator[bytes]:
    """All of them as bytes, with one copy from each device."""
    far: dict[torch.device, list[Tensor]] = {}
    for found in sums:
        if isinstance(found, Tensor):
            far.setdefault(found.device, []).append(found)
    near = {device: iter(torch.cat(parts).cpu().split([len(p) for p in parts])) for device, parts in far.items()}
    for found in sums:
        yield next(near[found.device]).numpy().tobytes() if isinstance(found, Tensor) else found


def _lasting_buffers(module: nn.Module) -> list[Tensor | None]:
    """A module's buffers, but for frequencies that `forward` makes of others by a text's length."""
    changing = is_length_dependent(module)
    originals = {name for name in module._buffers if "original_inv_freq" in name}
    made = {name.replace("original_inv_freq", "inv_freq") for name in originals} if changing else set()
    return [tensor for name, tensor in module._buffers.items() if name not in made]


def _tensors(model: nn.Module) -> dict[Span, Tensor]:
    """Every parameter and buffer, those that share their memory once."""
    held = (t for m in model.modules() for t in (*m._parameters.values(), *_lasting_buffers(m)))
    inner = (tensor for whole in held if whole is not None for tensor in _inner(whole))
    return {span_of(tensor): tensor for tensor in inner if tensor.numel()}


def _inner(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor, or those that a quantised one is made of."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _inner(getattr(tensor, name))


def _of_cpu(data: np.ndarray) -> bytes:
    """Of contiguous bytes."""
    library = load_library()
    if library is None or len(data) % 4 or data.ctypes.data % 4:
        return zlib.crc32(data.data).to_bytes(4, "little")
    words = data.view(np.uint32)
    sums = np.empty(-(-len(words) // BLOCK_WORDS), np.uint64)
    at, to = array_address(words, np.uint32), array_address(sums, np.uint64)
    library.weights_checksum(at, len(words), torch.get_num_threads(), to)
    return sums.tobytes()


def _of_device(data: Tensor) -> Tensor:
    """Of contiguous bytes: every word times an odd random number of its own, summed by chunks; LongTensor [chunks]."""
    words = data.view(torch.int32) if data.numel() % 4 == 0 and data.storage_offset() % 4 == 0 else data
    factors = _factors(data.device, CHUNK)  # 64 bits wide, so that products are
    sums = []
    for piece in words.split(PIECE):
        whole = len(piece) // CHUNK * CHUNK
        if whole:
            sums.append((piece[:whole].view(-1, CHUNK) * factors).sum(1))
        if whole < len(piece):
            sums.append((piece[whole:] * factors[: len(piece) - whole]).sum()[None])
    return torch.cat(sums) if sums else factors[:0]


@functools.cache
def _factors(device: torch.device, count: int) -> Tensor:
    """LongTensor [count] of odd random numbers, the same in every run."""
    numbers = np.random.default_rng(0).integers(-(2**63), 2**63, count) | 1
    return torch.from_numpy(numbers).to(device)
