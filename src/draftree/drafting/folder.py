"""The folder of a trained drafter: `draftree_config.json` describes it, `drafter.safetensors` holds its tensors.

A drafter inside the model drafts well for that model alone. So the config names its base model by a hash of all
weights, and a drafter that does not fit is refused in one sentence before anything runs.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from draftree.errors import brief, did_you_mean
from draftree.published import kind_of, refuse_published
from draftree.registry import IN_MODEL, MTP, REGISTRY, SHIPPED, SMALL, TRAINED, UNTRAINED
from draftree.runner.target import inspect_model
from draftree.runner.weights.blocks import PackedEmbedding
from draftree.runner.weights.packed import PackedLinear
from draftree.runner.weights.stock import fingerprint, parts_of


@dataclass(frozen=True, slots=True)
class Base:
    """The model that something was trained for."""

    name: str  # its hub name, or the last part of its folder's
    hash: str  # `model_hash` of its weights
    model_type: str  # Hugging Face's name of the family


_hashes: weakref.WeakKeyDictionary[Any, tuple[Any, str]] = weakref.WeakKeyDictionary()


def model_hash(model: Any) -> str:
    """Return the SHA-256 (hexadecimal) of the names, shapes, dtypes and bytes of a model's parameters, sorted by name.

    Parameters of 16 bits count as float32, which holds them exactly: a drafter belongs to the model in either type.
    Computed once per model object, and again when its weights have changed.
    """
    packed: dict[str, Any] = {}
    for name, module in model.named_modules():  # a tied head counts as its embedding, as among parameters
        if isinstance(module, PackedLinear | PackedEmbedding):
            places = {other.packed.data_ptr() for other in packed.values()}
            packed |= {} if module.packed.data_ptr() in places else {f"{name}.weight": module}
    named = [(name, part) for name, parameter in model.named_parameters() for part in parts_of(parameter)]
    parameters = sorted([*named, *((name, m.packed) for name, m in packed.items())], key=lambda pair: pair[0])
    if any(parameter.is_meta for _, parameter in parameters):
        raise ValueError(
            "The model's weights are offloaded and cannot be compared: load the drafter with "
            "same_weights=False, or the model without offloading."
        )
    known = fingerprint(model)
    held = _hashes.get(model)
    if held is not None and held[0] == known:
        return held[1]
    digest = hashlib.sha256()
    for name, parameter in parameters:
        if name in packed:
            parameter = packed[name].weight
        if parameter.dtype in (torch.float16, torch.bfloat16):
            parameter = parameter.detach().float()
        digest.update(f"{name} {list(parameter.shape)} {parameter.dtype}\n".encode())
        digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    _hashes[model] = (known, digest.hexdigest())
    return digest.hexdigest()


def base_of(model: Any) -> Base:
    """Return the name, hash and family of `model`."""
    target = inspect_model(model)
    name = str(getattr(target.model.config, "_name_or_path", "") or target.model_type)
    if Path(name).is_dir():  # a path of this machine says nothing to others
        name = Path(name).resolve().name
    return Base(name, model_hash(target.model), target.model_type)


CONFIG = "draftree_config.json"
WEIGHTS = "drafter.safetensors"
FORMAT = 1


class Trained(ABC):
    """Base of drafters inside the model and of early heads: trained for one model, saved as a folder.

    Attributes:
        method: its name in folders and commands.
        weights: all trained tensors; the keys of its `state_dict` are the file's tensor names.
        settings: arguments of `fresh` besides the model, as JSON values.
        base: the model that it was trained for; None until trained or loaded.
        recipe: how it was trained; None where that is unknown.
    """

    method: ClassVar[str]
    weights: nn.Module
    settings: dict[str, Any]
    base: Base | None = None
    recipe: dict[str, Any] | None = None

    @classmethod
    @abstractmethod
    def fresh(cls, model: Any, **settings: Any) -> Self:
        """Return an untrained one, with shapes taken from `model`."""

    @abstractmethod
    def shapes(self) -> dict[str, Any]:
        """Return the sizes of a model that these weights fit."""

    def save_pretrained(self, folder: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Write config and tensors into `folder`, which is made if it is missing.

        Args:
            folder: a path.
            dtype: type of floating tensors in the file; they are read back as float32.

        Raises:
            ValueError: `base` is None.
        """
        shapes = self.shapes()
        if self.base is None:
            raise ValueError(
                f"This {self.method} drafter belongs to no model yet: train it, or set "
                "drafter.base = draftree.drafting.folder.base_of(model)."
            )
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: t.detach().cpu().contiguous() for name, t in self.weights.state_dict().items()}
        if dtype is not None:
            tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        config = {
            "format": FORMAT,
            "method": self.method,
            "base_model": asdict(self.base),
            "shapes": shapes,
            "settings": self.settings,
            "recipe": self.recipe,
        }
        text = json.dumps(config, indent=2, default=lambda number: number.tolist()) + "\n"  # of NumPy
        (folder / WEIGHTS).write_bytes(save(tensors, {"format": "pt"}))  # `save_file` lets the owner alone read it
        (folder / CONFIG).write_text(text, encoding="utf-8")

    @classmethod
    def from_pretrained(cls, folder_or_repo: str | Path, model: Any, *, same_weights: bool = True) -> Self:
        """Read a folder or hub repository of this method; see `load_drafter`."""
        held = _load(folder_or_repo, model, same_weights)
        if not isinstance(held, cls):
            raise ValueError(f"{str(folder_or_repo)!r} holds {held.method}, not {cls.method}: load it as that.")
        return held


def load_drafter(folder_or_repo: str | Path, model: Any, *, same_weights: bool = True) -> Any:
    """Load the trained or published drafter of a folder or hub repository for `model`.

    Args:
        folder_or_repo: folder with `draftree_config.json` and `drafter.safetensors`, or a published drafter (EAGLE-3,
            DFlash and their kin); or a hub repository of them; or "mtp", the MTP head in the model's own checkpoint;
            or "eagle-3", the package's head for SmolLM2-135M-Instruct.
        model: the Hugging Face model that it was trained for.
        same_weights: False takes any model of fitting shapes, such as a fine-tune, or weights rounded to another dtype;
            published drafters always do.

    Raises:
        ValueError: a missing or broken file, an unknown method, another base model (shapes, vocabulary, weights), or
            tensors of the wrong shape.
    """
    if folder_or_repo == MTP:
        return import_module("draftree.drafting.published").load_mtp(model)
    if folder_or_repo == SHIPPED:
        return _of_package(SHIPPED, model)
    folder = fetched(folder_or_repo)
    if not (folder / CONFIG).is_file() and kind_of(folder) is not None:
        return import_module("draftree.drafting.published").load_published(folder, model)
    held = _load(folder, model, same_weights)
    if not REGISTRY[held.method].drafts:
        raise ValueError(f"{str(folder_or_repo)!r} holds an {held.method}, which prunes and does not draft.")
    return held


def demo_drafter(method: str, model: Any) -> Any:
    """Load a trained drafter of the embedded model from the package.

    Args:
        method: "bita", "hidden-transfer", "medusa" or "draft-model".
        model: what `demo_model` returned.

    Raises:
        ValueError: no such drafter, or another model.
    """
    if method == SMALL:
        return import_module("draftree.drafting.draft_model").demo_draft_model(model)
    if method not in TRAINED:
        raise ValueError(f"There is no drafter {method!r} for the embedded model: choose {', '.join(TRAINED)}.")
    return _of_package(method, model)


def _of_package(name: str, model: Any) -> Any:
    with as_file(files("draftree") / "data" / "drafters" / name) as folder:
        return load_drafter(folder, model)


def named_drafter(name: str, model: Any, tokenizer: Any) -> Any:
    """Return a drafter that needs no training, that of a folder, or the embedded model's own of a method.

    Args:
        name: one of `UNTRAINED` or `TRAINED`, `MTP`, or the folder or hub name of a drafter or of a small model.
    """
    if name in UNTRAINED:
        return REGISTRY[name].load()()
    if name in TRAINED:
        return demo_drafter(name, model)
    if name not in (MTP, SHIPPED) and is_small_model(fetched(name)):
        return REGISTRY[SMALL].load().from_pretrained(name, tokenizer, dtype=inspect_model(model).dtype)
    return load_drafter(name, model)


def is_small_model(folder: Path) -> bool:
    """Return whether a folder holds a Hugging Face model and no trained drafter."""
    return (folder / "config.json").is_file() and not (folder / CONFIG).is_file() and kind_of(folder) is None


def method_class(method: Any) -> type[Trained]:
    """Return the class of a method of training."""
    if method not in IN_MODEL:
        raise ValueError(
            f"there is no method {brief(repr(method))} among {', '.join(IN_MODEL)}.{did_you_mean(method, IN_MODEL)}"
        )
    found: type[Trained] = REGISTRY[method].load()
    return found


def _load(folder_or_repo: str | Path, model: Any, same_weights: bool) -> Trained:
    target = inspect_model(model)
    folder = fetched(folder_or_repo)
    config, base = _read_config(folder)
    try:
        held = method_class(config["method"]).fresh(model, **config["settings"])
    except TypeError as error:
        raise ValueError(f"{folder / CONFIG} has settings that this version does not know: {brief(error)}.") from None
    except (ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{folder / CONFIG} does not fit this model: {brief(error)}.") from None
    for name, value in held.shapes().items():
        trained = config["shapes"].get(name)
        if trained != value:
            raise ValueError(
                f"The drafter in {str(folder)!r} was trained for a {name.replace('_', ' ')} of "
                f"{brief(repr(trained))}, and this model has {value}: load it with {brief(repr(base.name))}, "
                "or train one for this model."
            )
    if same_weights and base.hash != model_hash(target.model):
        raise ValueError(
            f"The drafter in {str(folder)!r} was trained for {brief(repr(base.name))} with other weights (or "
            "rounded to another dtype) than this model's, so few draft tokens would be accepted: load that model, or "
            "pass same_weights=False to try all the same."
        )
    _fill(held.weights, folder / WEIGHTS)
    held.base, held.recipe = base, config.get("recipe")
    return held


def fetched(folder_or_repo: str | Path) -> Path:
    """Return the folder of a drafter, also of one in a hub repository.

    Raises:
        ValueError: there is none.
    """
    folder, name = Path(folder_or_repo).expanduser(), str(folder_or_repo)
    if folder.is_dir():
        return folder
    if isinstance(folder_or_repo, Path) or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ValueError(f"There is no drafter folder {name!r}: give one with a {CONFIG}, or a hub name.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        found = Path(snapshot_download(name, allow_patterns=[CONFIG, WEIGHTS, "config.json"]))
        if kind_of(found) is not None:
            snapshot_download(name, allow_patterns=["model*.safetensors*", "pytorch_model*.bin*"])
        return found
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"{name!r} is no drafter folder, and the hub gave no such repository ({type(error).__name__}): check the "
            "name and the network."
        ) from None


def _read_config(folder: Path) -> tuple[dict[str, Any], Base]:
    if not (folder / CONFIG).is_file():
        refuse_published(folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"The folder {str(folder)!r} has no {name}: give a folder that save_pretrained wrote.")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        kinds = {"method": str, "shapes": dict, "settings": dict, "format": int}
        wrong = [name for name, kind in kinds.items() if not isinstance(config[name], kind)]
        base = Base(**config["base_model"])
    except (ValueError, KeyError, TypeError):
        wrong = [CONFIG]
    if wrong:
        raise ValueError(f"{folder / CONFIG} is broken: save the drafter again, or fetch the folder anew.")
    if config["format"] != FORMAT:
        raise ValueError(
            f"{folder / CONFIG} is of format {config['format']}, and this draftree reads {FORMAT}: update draftree, or "
            "train again."
        )
    return config, base


def _fill(weights: nn.Module, path: Path) -> None:
    """Replace all tensors of `weights` by those of a file, as float32."""
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError):
        raise ValueError(f"{path} is broken: save the drafter again, or fetch the folder anew.") from None
    expected = {name: list(tensor.shape) for name, tensor in weights.state_dict().items()}
    found = {name: list(tensor.shape) for name, tensor in tensors.items() if tensor.is_floating_point()}
    for name in sorted({*expected, *tensors}):
        if found.get(name) != expected.get(name):
            raise ValueError(
                f"{path} holds {name!r} with floating numbers of shape {found.get(name)}, and {expected.get(name)} is "
                f"expected: it does not belong to its {CONFIG}."
            )
        if not bool(tensors[name].isfinite().all()):
            raise ValueError(
                f"{path} holds infinite numbers or NaN in {name!r}: train the drafter again, with a lower learning "
                "rate if it happens once more."
            )
    # The tensors are copied: what `load_file` returns may be a view of the file.
    weights.load_state_dict({name: t.to(torch.float32, copy=True) for name, t in tensors.items()}, assign=True)
