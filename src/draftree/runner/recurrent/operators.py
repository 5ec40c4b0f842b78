"""Tree forms of the operators of recurrent layers.

Transformers keeps these operators as functions of the modelling files: one for many tokens in a row, one for a single
token. In a pass over trees the former is replaced:

- the convolution reads the last inputs among a node's own ancestors, then those kept of the context;
- the recurrence goes level by level, state(node) = step(state(parent), inputs(node)), with one call of the model's own
  one-token function for all nodes of a depth.

So a node's result is that of token-by-token decoding. The states of the context are only read. What the recurrence
needs of each row is kept until the commit, which replays the accepted path.

The replacement is in place as long as any pass over trees runs, and acts in the thread of such a pass alone.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

Step = Callable[..., Any]
CONV, CONV_STEP = "causal_conv1d_fn", "causal_conv1d_update"


@dataclass(slots=True)
class Scan:
    """The call of a recurrence over the rows of a pass.

    Attributes:
        rows: what the recurrence reads of each row, every tensor [B, n, ...].
        step: function of states [r, ...] and the `rows` of r nodes, each [r, ...]; it returns outputs [r, ...] and the
            next states, and leaves the states given as they are.
        result: function of the outputs [B, n, ...] and a state; it returns what the model's function returns.
    """

    rows: list[Tensor]
    step: Callable[[Tensor, list[Tensor]], tuple[Tensor, Tensor]]
    result: Callable[[Tensor, Tensor], Any]


def gated_delta_rule(own: Step, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Scan:
    """Describe a call of the gated delta rule (Qwen 3.5, Olmo Hybrid) or of Kimi Delta Attention.

    Args:
        query, key, value: [B, n, heads, width].
        options: `g` and `beta` [B, n, heads, ...], and further arguments of the model's function.
    """
    gates = [options.pop("g"), options.pop("beta")]
    options = {name: value for name, value in options.items() if name not in ("initial_state", "chunk_size")}
    options["output_final_state"] = True

    def step(states: Tensor, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = (row[:, None] for row in rows)
        output, states = own(q, k, v, g=g, beta=beta, initial_state=states, **options)
        return output[:, 0], states

    return Scan([query, key, value, *gates], step, lambda output, state: (output, state))


def mamba2(
    own: Step, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *_: Any, D: Any, dt_bias: Any, **options: Any
) -> Scan:
    """Describe a call of Mamba-2's scan.

    The one-token function does not limit dt, also where the scan does, as in Hugging Face's decoding.

    Args:
        x: [B, n, heads, width]; dt [B, n, heads]; A, D, dt_bias [heads]; B, C [B, n, groups, state size].
    """
    width = x.shape[3]

    def wide(tensor: Tensor) -> Tensor:
        return tensor[..., None].expand(*tensor.shape, width)

    def step(states: Tensor, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
        x, dt, B, C = rows
        states = states.clone()  # The function writes in place.
        decay = A[:, None, None].expand(-1, width, states.shape[-1])
        output = own(states, x, wide(dt), decay, B, C, wide(D), z=None, dt_bias=wide(dt_bias), dt_softplus=True)
        return output.view(x.shape), states

    def result(output: Tensor, state: Tensor) -> Any:
        return (output, state) if options.get("return_final_states") else output

    return Scan([x, dt, B, C], step, result)


def mamba1(
    own: Step, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *_: Any, D: Any, z: Any, **options: Any
) -> Scan:
    """Describe a call of Mamba-1's scan (Jamba, Falcon Mamba).

    Args:
        x: [B, channels, n], as dt and z; A [channels, state size]; B, C [B, state size, n]; D [channels].
    """

    def step(states: Tensor, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
        x, dt, B, C, z = rows
        states = states.clone()
        output = own(states, x, dt, A, B, C, D, z=z, dt_bias=options.get("delta_bias"), dt_softplus=True)
        return output, states

    def result(output: Tensor, state: Tensor) -> Any:
        output = output.transpose(1, 2)
        return (output, state) if options.get("return_last_state") else output

    return Scan([tensor.transpose(1, 2) for tensor in (x, dt, B, C, z)], step, result)


# By the name of the function for many tokens: its one-token form, and the description of a call.
SCANS: dict[str, tuple[str, Callable[..., Scan]]] = {
    "torch_chunk_gated_delta_rule": ("torch_recurrent_gated_delta_rule", gated_delta_rule),
    "chunk_kimi_delta_attention": ("recurrent_kimi_delta_attention", gated_delta_rule),
    "mamba2_chunk_scan": ("mamba2_selective_state_update", mamba2),
    "mamba_selective_scan": ("mamba_selective_state_update", mamba1),
}


class Forest:
    """The ancestry of the rows of a pass.

    Args:
        visible: BoolTensor [B, n, n]; each row sees its ancestors among the rows, and itself.
        sizes: real rows of each request, the first ones; None for all.
    """

    def __init__(self, visible: Tensor, sizes: tuple[int, ...] | None) -> None:
        self.shape, self.device = visible.shape[:2], visible.device
        count = visible.shape[1]
        seen = visible.cpu()
        depth = seen.sum(2) - 1
        above = seen & ~torch.eye(count, dtype=torch.bool, device="cpu")
        parent = (above * (depth[:, None] + 1)).argmax(2)
        parent = torch.where(depth > 0, parent, -1)
        if sizes is not None:
            real = torch.arange(count, device="cpu") < torch.tensor(sizes, dtype=torch.long, device="cpu")[:, None]
            depth = depth.masked_fill(~real, -1)
        self._depth, self._parent = depth, parent
        self._windows: dict[int, Tensor] = {}

    @cached_property
    def levels(self) -> list[tuple[Tensor, Tensor]]:
        """Rows of each depth as numbers in [0, B * n), and the place of each one's parent in the level before.

        The places of the first level are the requests.
        """
        batch, count = self.shape
        found, place = [], torch.zeros(batch, count, dtype=torch.long, device="cpu")
        for level in range(int(self._depth.max()) + 1):
            request, row = (self._depth == level).nonzero(as_tuple=True)
            above = request if level == 0 else place[request, self._parent[request, row]]
            place[request, row] = torch.arange(len(row), device="cpu")
            found.append(((request * count + row).to(self.device), above.to(self.device)))
        return found

    def windows(self, kernel: int) -> Tensor:
        """Return the last `kernel` inputs before each row, LongTensor [B, n, kernel].

        Inputs are numbered from 0 for the `kernel` inputs kept of the context, then by row.
        """
        if kernel in self._windows:
            return self._windows[kernel]
        batch, count = self.shape
        windows = torch.arange(kernel, device="cpu").expand(batch, count, kernel).clone()
        for level in range(1, int(self._depth.max()) + 1):
            request, row = (self._depth == level).nonzero(as_tuple=True)
            parent = self._parent[request, row]
            windows[request, row, :-1] = windows[request, parent, 1:]
            windows[request, row, -1] = kernel + parent
        self._windows[kernel] = windows.to(self.device)
        return self._windows[kernel]


def scan_tree(scan: Scan, states: Tensor, forest: Forest) -> Any:
    """Return what the model's function returns, for rows of trees behind `states` [B, ...]."""
    flat = [rows.flatten(0, 1) for rows in scan.rows]
    output, level = None, states
    for rows, above in forest.levels:
        some, level = scan.step(level[above], [row[rows] for row in flat])
        if output is None:
            output = some.new_zeros(len(flat[0]), *some.shape[1:])
        output[rows] = some
    assert output is not None
    return scan.result(output.unflatten(0, forest.shape), states)


def convolve_tree(own: Step, inputs: Tensor, kept: Tensor, forest: Forest, *given: Any, **options: Any) -> Tensor:
    """Return the convolution of each row's own window.

    Args:
        inputs: [B, channels, n].
        kept: last inputs of the context, [B, channels, kernel].
        forest: ancestry of the rows.
    """
    batch, channels, count = inputs.shape
    windows = forest.windows(kept.shape[2])  # [B, n, kernel]
    index = windows.flatten(1)[:, None].expand(-1, channels, -1)
    before = torch.cat([kept.to(inputs.dtype), inputs], 2).gather(2, index).unflatten(2, windows.shape[1:])
    states = before.transpose(1, 2).flatten(0, 1)  # [B * n, channels, kernel]
    rows = inputs.transpose(1, 2).flatten(0, 1)[..., None]
    output: Tensor = own(rows, states, *given, **options)
    return output[..., 0].unflatten(0, (batch, count)).transpose(1, 2)


# ---------------------------------------------------------------- in the place of the model's functions

_local = threading.local()
_users: Counter[str] = Counter()  # passes under way by modelling file
_held: dict[str, dict[str, Any]] = {}
_changing = threading.Lock()


@contextmanager
def replaced(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Replace the attribute `module.name` inside this context."""
    held = module.__dict__.get(name)  # an instance's own, such as accelerate's `forward`
    module.__dict__[name] = value
    try:
        yield
    finally:
        if held is None:
            del module.__dict__[name]
        else:
            module.__dict__[name] = held


@contextmanager
def replaced_operators(files: tuple[str, ...], handler: Any) -> Iterator[None]:
    """Replace the functions for many tokens of modelling files in this thread, inside this context.

    Args:
        handler: has `convolve(own, inputs, ...)` and `scan(describe, own, ...)`, with `own` the one-token functions.
    """
    for file in files:
        _install(file)
    _local.handler = handler
    try:
        yield
    finally:
        _local.handler = None
        for file in files:
            _remove(file)


def _install(file: str) -> None:
    module = sys.modules[file]
    with _changing:
        _users[file] += 1
        if _users[file] > 1:
            return
        held = _held[file] = {}
        if hasattr(module, CONV):
            held[CONV] = getattr(module, CONV)
            setattr(module, CONV, _convolution(held[CONV], getattr(module, CONV_STEP)))
        for name, (one_token, describe) in SCANS.items():
            if hasattr(module, name):
                held[name] = getattr(module, name)
                setattr(module, name, _recurrence(held[name], getattr(module, one_token), describe))


def _remove(file: str) -> None:
    module = sys.modules[file]
    with _changing:
        _users[file] -= 1
        if not _users[file]:
            for name, function in _held.pop(file).items():
                setattr(module, name, function)


def _convolution(own: Step, one_token: Step) -> Step:
    def convolve(inputs: Tensor, *given: Any, **options: Any) -> Any:
        handler = getattr(_local, "handler", None)
        if handler is None:
            return own(inputs, *given, **options)
        return handler.convolve(one_token, inputs, *given, **options)

    return convolve


def _recurrence(own: Step, one_token: Step, describe: Callable[..., Scan]) -> Step:
    def scan(*given: Any, **options: Any) -> Any:
        handler = getattr(_local, "handler", None)
        if handler is None:
            return own(*given, **options)
        return handler.scan(describe(one_token, *given, **options))

    return scan
