"""Whether a model computes what its class says.

Runners that compute a stock model's layers themselves may drive nothing else. A model can be changed in more ways than
can be listed, so it is compared whole with what its class builds from its configuration, on the meta device, where that
takes milliseconds: modules, their settings, the shapes of their weights. What the comparison cannot see is looked for:
methods that were replaced on an object or on a class, functions that those call, hooks.
"""

from __future__ import annotations

import inspect
import os
import pickle
import weakref
from collections.abc import Iterator
from functools import lru_cache, partialmethod
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as hooks_of_all
from transformers import PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from draftree.runner.weights.packed import PackedLinear, eight_bits, readable

ORIGINS = tuple(f"{Path(str(package.__file__)).parent}{os.sep}" for package in (torch, transformers))
OUTPUT_HOOKS = ("transformers.utils.output_capturing",)  # they stay on a model that has returned hidden states
# Settings of modules that change in use, or change nothing about what a pass in evaluation mode computes.
LOOSE = ("training", "name_or_path", "generation_config", "gradient_checkpointing", "max_seq_len_cached")
# Of torch.nn.functional, what layers call that are computed without it.
FUNCTIONS = (
    "embedding", "gelu", "layer_norm", "linear", "relu", "rms_norm", "scaled_dot_product_attention", "silu", "softmax",
)  # fmt: skip
METHODS = (FunctionType, partialmethod)
SETTINGS = (bool, int, float, str, tuple, list, dict, type(None))


def alteration(model: Any) -> str | None:
    """What about a model is not as its class builds it from its configuration, in words; None for a stock model.

    The numbers in its weights and buffers may be any.
    """
    kind: Any = type(model)
    try:
        stock = _built(kind, pickle.dumps(model.config))
    except Exception:  # a class of the user's own may take other arguments
        return f"{kind.__name__} is not built from its configuration alone"
    own, theirs = dict(model.named_modules()), dict(stock.named_modules())
    if own.keys() != theirs.keys():
        name = sorted(own.keys() ^ theirs.keys())[0]
        return f"the module {name!r} is {'one too many' if name in own else 'missing'} by its configuration"
    dtype = model.dtype
    for name, module in own.items():
        difference = _difference(module, theirs[name], dtype)
        if difference is not None:
            return f"the {difference} of {f'its module {name!r}' if name else 'the model'} is not that of a stock model"
    if hooks_of_all._global_forward_hooks or hooks_of_all._global_forward_pre_hooks:
        return "torch calls a hook for every module"
    for namespace, name in _places(model, {type(module) for module in own.values()}):
        if not _stock_function(namespace.get(name)):
            return f"{name!r}, which it calls, is not as torch or transformers define it"
    return None


@lru_cache(maxsize=8)
def _built(kind: type, config: bytes) -> Any:
    """A model of a class on the meta device, to look at; an engine and its drafters ask several times for the same."""
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        return kind(pickle.loads(config))


def _difference(module: nn.Module, stock: nn.Module, dtype: torch.dtype) -> str | None:
    """The first thing about a module that is not as in the stock one, by name."""
    if _foreign_hooks(module):
        return "hooks"
    if type(module) is PackedLinear:
        same = type(stock) is nn.Linear and (module.in_features, module.out_features) == stock.weight.shape[::-1]
        if not same or module.panels.dtype != dtype or not readable(module.panels):
            return "class"
        if (module.bias is None) != (stock.bias is None):
            return "set of parameters"
        return _replaced_method(module, stock)
    if type(module) is not type(stock):
        return "class"
    for name, value in stock.__dict__.items():
        settings = not name.startswith("_") and name not in LOOSE and isinstance(value, SETTINGS)
        if settings and module.__dict__.get(name) != value:
            return f"setting {name!r}"
    if (replaced := _replaced_method(module, stock)) is not None:
        return replaced
    for kind, own, theirs in (
        ("parameter", module._parameters, stock._parameters),
        ("buffer", module._buffers, stock._buffers),
    ):
        if own.keys() != theirs.keys():
            return f"set of {kind}s"
        for name, tensor in own.items():
            small = (
                type(module) is nn.Linear and tensor is not None and name == "weight" and eight_bits(tensor) is not None
            )
            if not _alike(tensor, theirs[name], dtype if kind == "parameter" else None, of_any_class=small):
                return f"{kind} {name!r}"
    return None


def _replaced_method(module: nn.Module, stock: nn.Module) -> str | None:
    for name, value in module.__dict__.items():
        shown = name == "extra_repr"  # which torchao sets, and nothing computes with
        if callable(value) and not shown and name not in stock.__dict__ and hasattr(type(module), name):
            return f"method {name!r}"
    return None


def _alike(tensor: Tensor | None, stock: Tensor | None, dtype: torch.dtype | None, *, of_any_class: bool) -> bool:
    """Whether a tensor lies in memory as a stock one does; of a quantised class none does."""
    if tensor is None or stock is None:
        return tensor is stock
    known = of_any_class or type(tensor) is type(stock)
    plain = known and tensor.shape == stock.shape and tensor.is_contiguous()
    # A parameter made in inference mode counts no changes.
    return plain and (dtype is None or (tensor.dtype == dtype and not tensor.is_inference()))


def _foreign_hooks(module: nn.Module) -> bool:
    return "_hf_hook" in module.__dict__ or bool(_hooks(module))


def _hooks(module: nn.Module) -> list[int]:
    """Torch's numbers of a module's hooks, which it gives out once; but for transformers' that only look."""
    hooks = [*module._forward_hooks.items(), *module._forward_pre_hooks.items()]
    return [number for number, hook in hooks if getattr(hook, "__module__", None) not in OUTPUT_HOOKS]


Place = tuple[Any, str]  # a namespace, and the name of a function in it
_seen: dict[type, list[Place]] = {}


def _places(model: Any, kinds: set[type]) -> Iterator[Place]:
    """Where the functions that a model's passes call are looked up: those of its modules' classes, and of attention."""
    yield from ((vars(F), name) for name in FUNCTIONS)
    yield ALL_ATTENTION_FUNCTIONS, model.config._attn_implementation
    for kind in kinds - {PackedLinear}:
        known = _seen.get(kind)
        if known is None:
            known = _places_of(kind)
            if all(_stock_function(namespace.get(name)) for namespace, name in known):
                _seen[kind] = known
        yield from known


def _places_of(kind: type) -> list[Place]:
    """Methods of a class below `nn.Module`, and the functions of their own modules that these call."""
    found: list[Place] = []
    for part in kind.__mro__:
        if part is nn.Module:
            break
        found += [(vars(part), name) for name, value in vars(part).items() if isinstance(value, METHODS)]
    for namespace, name in found:  # which grows
        function = inspect.unwrap(namespace[name])
        if not isinstance(function, FunctionType) or not function.__module__.startswith("transformers.models."):
            continue
        for called in function.__code__.co_names:
            place = function.__globals__, called
            if isinstance(place[0].get(called), FunctionType) and not any(
                place[0] is known and called == as_ for known, as_ in found
            ):
                found.append(place)
    return found


def _stock_function(function: Any) -> bool:
    """Whether torch or transformers define a function; None (an attention that is not known) passes.

    A wrapper may say that it is of a function's class, and have the function's code.
    """
    if function is None:
        return True
    return all(
        part.__code__.co_filename.startswith(ORIGINS)
        if type(part) is FunctionType
        else type(part) is BuiltinFunctionType
        for part in (function, inspect.unwrap(function))
    )


# What every module has, and is looked at by itself, and what a model gets that has returned hidden states.
_TORCHS = frozenset(nn.Module().__dict__) | {*LOOSE, "_output_capturing_hooks_installed"}
_PLAIN = frozenset((bool, int, float, str, type(None)))
# What switches are made of, such as an adapter's name and its scale. Whole numbers may count calls, lists may grow.
_SWITCHES = frozenset((bool, float, str, type(None)))
_NAMES = frozenset((bool, str))
MOST_SWITCHES = 64  # of a container


class _Same(weakref.ref[Any]):
    """Equal where both point to one object that lives: an address is given out again when its object has gone."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        mine = self()
        return mine is not None and isinstance(other, _Same) and mine is other()

    __hash__ = None  # type: ignore[assignment]


def _lists_names(value: Any) -> bool:
    listed = type(value) in (list, tuple) and 0 < len(value) <= MOST_SWITCHES
    return listed and _NAMES.issuperset(map(type, value))


def _identity(value: Any) -> Any:
    """What tells a value that is not plain from others: of containers of switches the contents, else which it is."""
    if type(value) is dict and 0 < len(value) <= MOST_SWITCHES and _SWITCHES.issuperset(map(type, value.values())):
        return [*map(str, value), *value.values()]
    if _lists_names(value):
        return list(value)
    try:
        return _Same(value)
    except TypeError:  # of a class without weak references
        return id(value)


def state_of(model: nn.Module) -> list[Any]:
    """What `alteration` looks at on the model itself, to be compared with what it was before a runner was opened.

    Not what the weights are. One flat list, as this runs before every text, and thousands of tuples would set off
    Python's garbage collector each time.
    """
    state: list[Any] = [*hooks_of_all._global_forward_hooks, *hooks_of_all._global_forward_pre_hooks]
    _add_config(state, getattr(model, "config", None))
    modules = list(model.modules())
    state += [namespace.get(name) for namespace, name in _places(model, {type(module) for module in modules})]
    for module in modules:
        kind, own = type(module), module.__dict__
        state += (weakref.ref(module), kind)
        for parameter in module._parameters.values():
            if parameter is None:
                state.append(None)
            elif type(parameter) in (nn.Parameter, Tensor):
                state += (parameter.data_ptr(), parameter.dtype, parameter.stride())
            else:  # quantised ones have no single place in memory
                state += (_Same(parameter), eight_bits(parameter) is not None)
        if isinstance(module, PackedLinear):
            state.append(module.panels.data_ptr())
        if module._forward_hooks or module._forward_pre_hooks:
            state += _hooks(module)
        for name in own.keys() - _TORCHS:
            value = own[name]
            if not name.startswith("_") or type(value) in _NAMES or _lists_names(value) or callable(value):
                state.append(value if type(value) in _PLAIN else _identity(value))
    return state


def _add_config(state: list[Any], config: Any) -> None:
    """Add a configuration's values, and those of the ones in it."""
    for value in getattr(config, "__dict__", {}).values():
        if type(value) in _PLAIN:
            state.append(value)
        elif isinstance(value, dict | list | tuple):
            state.append(str(value))
        elif isinstance(value, PretrainedConfig):
            _add_config(state, value)
