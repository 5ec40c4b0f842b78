"""Whether a model computes what its class says.

Runners that compute a stock model's layers themselves may drive nothing else. A model can be changed in more ways than
can be listed, so it is compared whole with what its class builds from its configuration, on the meta device, where that
takes milliseconds: modules, their settings, the shapes of their weights. What the comparison cannot see is looked for:
methods that were replaced on an object or on a class, functions that those call, activations, masks, hooks.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import pickle
import threading
import weakref
from collections.abc import Iterator
from functools import partial, partialmethod
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as hooks_of_all
from transformers import PretrainedConfig, masking_utils
from transformers.activations import ACT2FN
from transformers.integrations import sdpa_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from draftree.runner.weights.blocks import PackedEmbedding
from draftree.runner.weights.packed import PackedLinear
from draftree.runner.weights.torchao import eight_bits

ORIGINS = (*(f"{Path(str(package.__file__)).parent}{os.sep}" for package in (torch, transformers)), contextlib.__file__)
STOCK = "transformers.models."  # where the classes are that come with transformers
OUTPUT_HOOKS = ("transformers.utils.output_capturing",)  # they stay on a model that has returned hidden states
# The package `kernels`, where it is installed, builds transformers' modules with its own functions on them.
KERNELS = tuple(getattr(find_spec("kernels"), "submodule_search_locations", None) or ())
# Settings of modules that change in use, or change nothing about what a pass in evaluation mode computes.
LOOSE = (
    "training", "name_or_path", "generation_config", "gradient_checkpointing",
    "_compiled_call_impl", "_compiled_call",  # `forward` compiled by torch, which computes the same
)  # fmt: skip
# How names end of what longrope's and dynamic NTK's `forward` leaves on its module, of all layers or of a kind.
MADE_IN_USE = ("long_inv_freq", "max_seq_len_cached")
SCALING = "attention_scaling"  # likewise, on modules that have one for each kind
# Of torch.nn.functional, what layers call that are computed without it.
FUNCTIONS = (
    "dropout", "embedding", "gelu", "layer_norm", "linear", "relu", "rms_norm", "scaled_dot_product_attention", "silu",
    "softmax",
)  # fmt: skip
ACTIVATIONS = {name: ACT2FN.get(name) for name in ACT2FN}  # classes by name, as they were before anybody replaced one
METHODS = (FunctionType, partialmethod)
SETTINGS = (bool, int, float, str, tuple, list, dict, type(None))
FUNCTIONS_HELD = (FunctionType, BuiltinFunctionType, MethodType, partial)
KEPT = 8
# Stock models on the meta device, by class and configuration: an engine, its drafters and their small models ask
# several times for the same.
_stocks: dict[tuple[type, bytes], Any] = {}
_keeping = threading.Lock()


def alteration(model: Any) -> str | None:
    """Return what of a model, but for its numbers, is not as its class builds it, in words; None for a stock model."""
    kind, key = type(model), None
    with contextlib.suppress(Exception):  # a configuration that cannot be pickled
        key = kind, pickle.dumps(model.config)
    known = None if key is None else _stocks.get(key)
    if known is not None and _departure(model, known) is None:
        return None
    try:
        # Transformers' classes draw nothing there, and to set the generator back rewinds what other threads have drawn.
        kept = contextlib.nullcontext() if kind.__module__.startswith(STOCK) else torch.random.fork_rng(devices=[])
        with torch.device("meta"), kept:
            stock = kind(copy.deepcopy(model.config))
    except Exception:  # a class of the user's own may take other arguments
        return f"{kind.__name__} is not built from its configuration alone"
    departure = _departure(model, stock)
    if departure is None and key is not None:  # else something may have been replaced while it was built
        with _keeping:
            _stocks[key] = stock
            if len(_stocks) > KEPT:
                del _stocks[next(iter(_stocks))]
    return departure


def _departure(model: Any, stock: Any) -> str | None:
    """See `alteration`; `stock` is what the model's class builds from its configuration."""
    own, theirs = dict(model.named_modules()), dict(stock.named_modules())
    if own.keys() != theirs.keys():
        name = sorted(own.keys() ^ theirs.keys())[0]
        return f"the module {name!r} is {'one too many' if name in own else 'missing'} by its configuration"
    dtype, configs = model.dtype, _configs(model)
    for name, module in own.items():
        difference = _difference(module, theirs[name], dtype) or _other_config(module, theirs[name], configs)
        if difference is not None:
            return f"the {difference} of {f'its module {name!r}' if name else 'the model'} is not that of a stock model"
    if hooks_of_all._global_forward_hooks or hooks_of_all._global_forward_pre_hooks:
        return "torch calls a hook for every module"
    for lookup in _lookups(model, {type(module) for module in own.values()}):
        if not _stock_function(lookup):
            return f"{lookup.name!r}, which it calls, is not as torch or transformers define it"
    for name, known in ACTIVATIONS.items():
        if ACT2FN.get(name) != known:
            return f"the activation {name!r}, of which it may be built, is not transformers'"
    return None


def _difference(module: nn.Module, stock: nn.Module, dtype: torch.dtype) -> str | None:
    """The first thing about a module that is not as in the stock one, by name."""
    if has_hooks(module):
        return "hooks"
    if type(module) is PackedLinear:
        same = type(stock) is nn.Linear and (module.in_features, module.out_features) == stock.weight.shape[::-1]
        if not same or module.dtype != dtype or not module.readable or (module.bias is None) != (stock.bias is None):
            return "class"
        return _replaced_method(module, stock)
    if type(module) is PackedEmbedding:
        same = type(stock) is module.stock and (module.num_embeddings, module.embedding_dim) == stock.weight.shape
        same = same and module.scale == getattr(stock, "scalar_embed_scale", 1.0)
        return _replaced_method(module, stock) if same and dtype == torch.float32 else "class"
    if type(module) is not type(stock):
        return "class"
    for name, value in stock.__dict__.items():
        if name.startswith("_") or name in LOOSE or name.endswith(MADE_IN_USE):
            continue
        if isinstance(value, SETTINGS) and module.__dict__.get(name) != value:
            return f"setting {name!r}"
        if isinstance(value, FUNCTIONS_HELD) and _bare(module.__dict__.get(name)) != _bare(value):
            return f"function {name!r}"
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


def _bare(function: Any) -> Any:
    """What tells a function that a module holds from others; what it is bound to aside, which are two models."""
    if isinstance(function, partial):
        return function.func, function.args, function.keywords
    return function.__func__ if isinstance(function, MethodType) else function


def _configs(model: Any) -> dict[int, Any]:
    """A model's configuration and those in it, by identity."""
    found: dict[int, Any] = {}
    waiting = [model.config]
    for config in waiting:  # which grows
        found[id(config)] = config
        inner = (value for value in vars(config).values() if isinstance(value, PretrainedConfig))
        waiting += (value for value in inner if id(value) not in found)
    return found


def _other_config(module: nn.Module, stock: nn.Module, configs: dict[int, Any]) -> str | None:
    """Whether a module reads a configuration that is not the model's. Encoder-decoders have copies for their halves."""
    own, theirs = module.__dict__.get("config"), getattr(stock, "config", None)
    if not isinstance(own, PretrainedConfig) or id(own) in configs:
        return None
    same = own._attn_implementation == getattr(theirs, "_attn_implementation", None)
    if not any(config.is_encoder_decoder for config in configs.values()):
        same = same and own == theirs
    return None if same else "configuration"


def _replaced_method(module: nn.Module, stock: nn.Module) -> str | None:
    for name, value in module.__dict__.items():
        shown = name == "extra_repr" or name in LOOSE  # the former torchao sets, and nothing computes with
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


def has_hooks(module: nn.Module) -> bool:
    """Whether anybody but transformers looks at, or changes, what a module gets and returns."""
    return "_hf_hook" in module.__dict__ or bool(_hooks(module))


def _hooks(module: nn.Module) -> list[int]:
    """Torch's numbers of a module's hooks, which it gives out once; but for transformers' that only look."""
    hooks = [*module._forward_hooks.items(), *module._forward_pre_hooks.items()]
    return [number for number, hook in hooks if getattr(hook, "__module__", None) not in OUTPUT_HOOKS]


class Lookup(NamedTuple):
    """Where a function is looked up.

    Attributes:
        namespace: of a class or a module, or a register.
        name: of the function in it.
        home: the module and class that define it, "module.Class"; of one in a register its own name, empty where it may
            be any.
    """

    namespace: Any
    name: str
    home: str


CALLS = ("__call__", "_call_impl", "_wrapped_call_impl")  # of a module, which have its `forward` called
OF_TORCH = [Lookup(vars(F), name, F.__name__) for name in FUNCTIONS]
OF_TORCH += [Lookup(vars(nn.Module), name, f"{nn.Module.__module__}.{nn.Module.__qualname__}") for name in CALLS]
OF_ATTENTION = [
    Lookup(vars(module), name, module.__name__)
    for module in (masking_utils, sdpa_attention)
    for name, value in vars(module).items()
    if isinstance(value, FunctionType)
]
# What transformers registers by the names of the implementations that take masks of four dimensions.
ATTENTION = {"sdpa": f"{sdpa_attention.__name__}.sdpa_attention_forward"}
MASKS = {"sdpa": f"{masking_utils.__name__}.sdpa_mask", "eager": f"{masking_utils.__name__}.eager_mask"}
# By class: how many names it and each class below `nn.Module` have, as it may get another one, and its places.
_seen: dict[type, tuple[list[int], list[Lookup]]] = {}


def _lookups(model: Any, kinds: set[type]) -> Iterator[Lookup]:
    """Where the functions that a model's passes call are looked up: of its modules' classes, attention and masks."""
    yield from OF_TORCH
    yield from OF_ATTENTION
    name = model.config._attn_implementation
    yield Lookup(ALL_ATTENTION_FUNCTIONS, name, ATTENTION.get(name, ""))
    yield Lookup(ALL_MASK_ATTENTION_FUNCTIONS, name, MASKS.get(name, ""))
    for kind in kinds - {PackedLinear, PackedEmbedding}:
        sizes = [len(vars(part)) for part in _own_classes(kind)]
        known = _seen.get(kind)
        if known is None or known[0] != sizes:
            known = sizes, _lookups_of(kind)
            if all(map(_stock_function, known[1])):
                _seen[kind] = known
        yield from known[1]


def _own_classes(kind: type) -> Iterator[type]:
    """A class of modules and those it inherits from, below `nn.Module`."""
    return takewhile(lambda part: part is not nn.Module, kind.__mro__)


def _lookups_of(kind: type) -> list[Lookup]:
    """Methods of a class below `nn.Module`, and the functions of their own modules that these call."""
    found: list[Lookup] = []
    for part in _own_classes(kind):
        home = f"{part.__module__}.{part.__qualname__}"
        methods = [name for name, value in vars(part).items() if isinstance(value, METHODS) or name == "forward"]
        found += [Lookup(vars(part), name, home) for name in methods]
    for namespace, name, _ in found:  # which grows
        function = inspect.unwrap(namespace[name])
        if not isinstance(function, FunctionType) or not function.__module__.startswith(STOCK):
            continue
        for called in function.__code__.co_names:
            lookup = Lookup(function.__globals__, called, function.__module__)
            if isinstance(lookup.namespace.get(called), FunctionType) and not any(
                lookup.namespace is known and called == as_ for known, as_, _ in found
            ):
                found.append(lookup)
    return found


def _stock_function(lookup: Lookup) -> bool:
    """Whether the function that a lookup finds is the one that torch or transformers define there; None passes.

    A wrapper may say that it is of a function's class, and have the function's code; and a function of the user's may
    stand between two of theirs.
    """
    function = lookup.namespace.get(lookup.name)
    if function is None:  # an attention that is not known
        return True
    while True:
        origins = ORIGINS if lookup.name != "__init__" else (*ORIGINS, *KERNELS)
        theirs = type(function) is FunctionType and function.__code__.co_filename.startswith(origins)
        if not theirs and type(function) is not BuiltinFunctionType:
            return False
        if not hasattr(function, "__wrapped__"):
            return not lookup.home or _at_home(function, lookup)
        function = function.__wrapped__


def _at_home(function: Any, lookup: Lookup) -> bool:
    """Whether a function is the one of its name. Modules and classes share some, but with no other family."""
    home = str(function.__module__)
    common = not home.startswith(STOCK)
    if any(lookup.namespace is register for register in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)):
        return f"{home}.{function.__qualname__}" == lookup.home
    if isinstance(lookup.namespace, dict):
        return function.__name__ == lookup.name and (common or home == lookup.home)
    own = f"{home}.{function.__qualname__}" == f"{lookup.home}.{lookup.name}"
    return own or (common and lookup.name != "forward")


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
    modules, configs = list(model.modules()), _configs(model)
    state += [lookup.namespace.get(lookup.name) for lookup in _lookups(model, {type(module) for module in modules})]
    for module in modules:
        kind, own = type(module), module.__dict__
        state += (weakref.ref(module), kind)
        config = own.get("config")
        if isinstance(config, PretrainedConfig) and id(config) not in configs:
            configs[id(config)] = config
            _add_config(state, config)
        for parameter in module._parameters.values():
            if parameter is None:
                state.append(None)
            elif type(parameter) in (nn.Parameter, Tensor):
                state += (parameter.data_ptr(), parameter.dtype, parameter.stride())
            else:  # quantised ones have no single place in memory
                state += (_Same(parameter), eight_bits(parameter) is not None)
        if isinstance(module, PackedLinear):
            state += (module.panels.data_ptr(), module.panels.dtype, module.dtype, module.form)
        if module._forward_hooks or module._forward_pre_hooks:
            state += _hooks(module)
        for name in sorted(own.keys() - _TORCHS):  # one more that is passed over must not change the others' order
            value = own[name]
            if name.endswith(MADE_IN_USE) or (name == SCALING and any(other.endswith(f"_{SCALING}") for other in own)):
                continue
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
