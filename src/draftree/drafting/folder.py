"""The folder of a trained drafter: `draftree_config.json` says what it is, `drafter.safetensors` holds its tensors.

A drafter inside the model is worth nothing with another model, and would look as if it worked. So the folder names
its base model by a hash of all weights, and whatever does not fit is refused in one sentence before anything runs.
The config holds a digest of the tensors, so that it is never taken with those of another save, or with damaged ones.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict
from importlib import import_module
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from draftree.drafting.base_model import Base as Base
from draftree.drafting.base_model import base_of as base_of
from draftree.drafting.base_model import model_hash as model_hash
from draftree.errors import brief, did_you_mean, given_as
from draftree.files import read_json, replacing_files
from draftree.runner.target import inspect_model

CONFIG = "draftree_config.json"
WEIGHTS = "drafter.safetensors"
FORMAT = 1
# Where a method's class lives; found by name, so that no drafter has to know another.
HOMES = {
    "medusa": "draftree.drafting.medusa",
    "bita": "draftree.drafting.bita",
    "hidden-transfer": "draftree.drafting.hidden_transfer",
    "early-head": "draftree.pruning.early_head",
}
NOT_DRAFTERS = ("early-head",)
SMALL = "draft-model"  # has a model of its own, in a folder of Hugging Face's

_device: ContextVar[str] = ContextVar("device", default="cpu")


def weights_device() -> str:
    """Where tensors of a new drafter are made: on the CPU, whatever torch's default; nowhere in `_without_tensors`."""
    return _device.get()


@contextmanager
def _without_tensors() -> Iterator[None]:
    """Drafters made in this block have the shapes of their tensors and no memory for them."""
    token = _device.set("meta")
    try:
        yield
    finally:
        _device.reset(token)


class Trained(ABC):
    """What is trained for one model and kept in a folder: drafters inside the model, and early heads.

    Attributes:
        method: the word of folders and commands.
        weights: all trained tensors; the keys of its `state_dict` are the file's tensor names.
        settings: arguments of `fresh` besides the model; JSON-able.
        base: the model they were trained for; None until trained or loaded.
        recipe: how they were trained; None where it is not known.
    """

    method: ClassVar[str]
    weights: nn.Module
    settings: dict[str, Any]
    base: Base | None = None
    recipe: dict[str, Any] | None = None

    @classmethod
    @abstractmethod
    def fresh(cls, model: Any, **settings: Any) -> Self:
        """Untrained, with shapes taken from `model`."""

    @abstractmethod
    def shapes(self) -> dict[str, Any]:
        """What of a model must be equal for these weights to fit."""

    def save_pretrained(self, folder: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Write config and tensors into `folder` (made where it is missing); a reader never sees half of them.

        Args:
            folder: where to.
            dtype: store floating tensors in this type; they are read back as fp32.

        Raises:
            ValueError: it is not known which model this belongs to, or was made for.
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
            "weights": _digest(tensors),
        }
        with replacing_files(folder) as temporary:
            (temporary / WEIGHTS).write_bytes(save(tensors, {"format": "pt"}))  # save_file would hide it from others
            (temporary / CONFIG).write_text(json.dumps(config, indent=2, default=_plain) + "\n", encoding="utf-8")

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | None = None) -> str:
        """Upload the folder to a hub repository, made where it is missing; returns the address of the commit."""
        import tempfile

        from huggingface_hub import HfApi

        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            api = HfApi(token=token)
            name = str(api.create_repo(repo_id, private=private, exist_ok=True).repo_id)
            commit = api.upload_folder(
                repo_id=name, folder_path=folder, commit_message=f"{self.method} drafter of draftree"
            )
        return str(commit)

    @classmethod
    def from_pretrained(cls, folder_or_repo: str | Path, model: Any, *, same_weights: bool = True) -> Self:
        """Read a folder or hub repository of this method; see `load_drafter`."""
        held = _load(folder_or_repo, model, same_weights)
        if not isinstance(held, cls):
            raise ValueError(f"{str(folder_or_repo)!r} holds {held.method}, not {cls.method}: load it as that.")
        return held


def load_drafter(folder_or_repo: str | Path, model: Any, *, same_weights: bool = True) -> Any:
    """The trained drafter in a folder or hub repository, ready for `model`.

    Args:
        folder_or_repo: folder with `draftree_config.json` and `drafter.safetensors`, or a hub repository of them.
        model: the Hugging Face model that it was trained for.
        same_weights: False takes any model of fitting shapes, such as a fine-tune, or weights rounded to another dtype.

    Raises:
        ValueError: a missing or broken file, another method, another base model (shapes, vocabulary, weights), tensors
            of the wrong shape; one sentence, what is wrong and what to do.
    """
    held = _load(folder_or_repo, model, same_weights)
    if held.method in NOT_DRAFTERS:
        raise ValueError(f"{str(folder_or_repo)!r} holds an {held.method}, which prunes and does not draft.")
    return held


def demo_drafter(method: str, model: Any) -> Any:
    """A trained drafter for the embedded model, without network.

    Args:
        method: "bita", "hidden-transfer", "medusa" or "draft-model".
        model: what `demo_model` returned.

    Raises:
        ValueError: no such drafter, or another model.
    """
    if method == SMALL:
        return import_module("draftree.drafting.draft_model").demo_draft_model(model)
    if method not in HOMES or method in NOT_DRAFTERS:
        known = ", ".join([*(name for name in HOMES if name not in NOT_DRAFTERS), SMALL])
        raise ValueError(f"There is no drafter {method!r} for the embedded model: choose {known}.")
    with as_file(files("draftree") / "data" / "drafters" / method) as folder:
        return load_drafter(folder, model)


def trained_drafter(name: str, model: Any, tokenizer: Any) -> Any:
    """The drafter of a folder that training wrote or a small model's, or one of the embedded model's own by its method.

    Args:
        name: of the folder or the method.
        model: the target.
        tokenizer: its own; a small model has to have the same.

    Raises:
        ValueError: of `load_drafter`, `demo_drafter` or `DraftModel.from_pretrained`.
    """
    if not Path(name).is_dir():
        return demo_drafter(name, model)
    if is_small_model(Path(name)):
        small = import_module("draftree.drafting.draft_model").DraftModel
        return small.from_pretrained(name, tokenizer, dtype=inspect_model(model).dtype)
    return load_drafter(Path(name), model)


def is_small_model(folder: Path) -> bool:
    """Whether a folder holds a model of Hugging Face's, and no drafter that training wrote."""
    return (folder / "config.json").is_file() and not (folder / CONFIG).is_file()


def _load(folder_or_repo: str | Path, model: Any, same_weights: bool) -> Trained:
    target = inspect_model(model)
    folder = _fetch(folder_or_repo)
    config = _read_config(folder)
    try:
        home = method_class(config["method"])
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG} is of no use here: {brief(error)}.") from None
    try:
        with _without_tensors():  # no setting of a file takes memory before its tensors are there
            held = home.fresh(model, **config["settings"])
    except TypeError as error:
        raise ValueError(f"{folder / CONFIG} has settings that this version does not know: {brief(error)}.") from None
    except (ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{folder / CONFIG} does not fit this model: {brief(error)}.") from None
    base = Base(**config["base_model"])
    _check_shapes(folder, config["shapes"], held.shapes(), base)
    if same_weights and base.hash != model_hash(target.model):
        raise ValueError(
            f"The drafter in {str(folder)!r} was trained for {brief(repr(base.name))} with other weights (or "
            "rounded to another dtype) than this model's, so few draft tokens would be accepted: load that model, or "
            "pass same_weights=False to try all the same."
        )
    _fill(held.weights, folder / WEIGHTS, config.get("weights"))
    held.base, held.recipe = base, config.get("recipe")
    return held


def _fetch(folder_or_repo: str | Path) -> Path:
    folder, name = Path(folder_or_repo), str(folder_or_repo)
    with suppress(OSError, RuntimeError):  # a path that is too long, a user that there is not
        folder = folder.expanduser()
        if folder.is_dir():
            return folder
    if isinstance(folder_or_repo, Path) or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ValueError(f"There is no drafter folder {name!r}: give one with a {CONFIG}, or a hub name.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=[CONFIG, WEIGHTS]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"{name!r} is no drafter folder, and the hub gave no such repository ({type(error).__name__}): check the "
            "name and the network."
        ) from None


def _read_config(folder: Path) -> dict[str, Any]:
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"The folder {str(folder)!r} has no {name}: give a folder that save_pretrained wrote.")
    try:
        config = read_json(folder / CONFIG)
        found = config["format"]
        whole = all(isinstance(value, str) for value in asdict(Base(**config["base_model"])).values())
        whole = whole and isinstance(config["method"], str)
        whole = whole and isinstance(config["shapes"], dict) and isinstance(config["settings"], dict)
    except (ValueError, KeyError, TypeError):
        whole, found = False, FORMAT
    if found != FORMAT:
        raise ValueError(
            f"{folder / CONFIG} is of format {brief(repr(found))}, and this draftree reads {FORMAT}: take a draftree "
            "of its time, or train again."
        )
    if not whole:
        raise ValueError(f"{folder / CONFIG} is broken: save the drafter again, or fetch the folder anew.")
    return dict(config)


def method_class(method: Any) -> type[Trained]:
    """The class that holds what `method` trains.

    Raises:
        ValueError: no such method.
    """
    if method not in HOMES:
        raise ValueError(
            f"there is no method {brief(repr(method))} among {', '.join(HOMES)}.{did_you_mean(method, HOMES)}"
        )
    home = vars(import_module(HOMES[method])).values()
    return next(c for c in home if isinstance(c, type) and c.__dict__.get("method") == method)


def _check_shapes(folder: Path, trained: Mapping[str, Any], present: Mapping[str, Any], base: Base) -> None:
    for name, value in present.items():
        if trained.get(name) != value:
            raise ValueError(
                f"The drafter in {str(folder)!r} was trained for a {name.replace('_', ' ')} of "
                f"{brief(repr(trained.get(name)))}, and this model has {value}: load it with {brief(repr(base.name))}, "
                "or train one for this model."
            )


def _plain(value: Any) -> Any:
    """NumPy's numbers and arrays as Python's own."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"A setting or a line of the recipe is {given_as(value)}: give plain numbers, strings and lists.")


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 (hexadecimal) over names, shapes, types and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _fill(weights: nn.Module, path: Path, digest: Any) -> None:
    """Put the tensors of the file in the place of those that were left out; `digest` is the config's, if it has one."""
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError, KeyError, AttributeError, TypeError, ValueError, RuntimeError):
        raise ValueError(f"{path} is broken: save the drafter again, or fetch the folder anew.") from None
    expected = weights.state_dict()
    for name, tensor in expected.items():
        if name not in tensors:
            raise ValueError(f"{path} has no tensor {name!r}: save the drafter again, or fetch the folder anew.")
        if tensors[name].shape != tensor.shape:
            raise ValueError(
                f"{path} holds {name!r} with shape {list(tensors[name].shape)}, not {list(tensor.shape)}: it does not "
                f"belong to its {CONFIG}."
            )
    extra = sorted(set(tensors) - set(expected))
    if extra:
        raise ValueError(f"{path} holds an unknown tensor {brief(repr(extra[0]))}: it does not belong to its {CONFIG}.")
    wrong = [name for name, tensor in tensors.items() if not tensor.is_floating_point()]
    if wrong:
        raise ValueError(f"{path} holds {wrong[0]!r} in whole or complex numbers: it does not belong to its {CONFIG}.")
    if digest not in (None, _digest(tensors)):
        raise ValueError(
            f"{path} does not hold the tensors that its {CONFIG} was saved with: save the drafter again, or fetch the "
            "folder anew."
        )
    # Copies, as what was read is a view of the file.
    read = {name: tensor.to(torch.float32, copy=True) for name, tensor in tensors.items()}
    wrong = [name for name, tensor in read.items() if not bool(tensor.isfinite().all())]
    if wrong:
        raise ValueError(
            f"{path} holds numbers in {wrong[0]!r} that are infinite or none at all: train the drafter again, with a "
            "lower learning rate if it happens once more."
        )
    weights.load_state_dict(read, assign=True)
