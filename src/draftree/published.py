"""Recognise published drafters by their files: EAGLE, DFlash, MTP and others that other engines run.

Their configuration is often that of a small llama, whose missing layers would be random. No file is unpickled, and
torch is not imported.
"""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

# Kinds that `architectures` or `speculators_model_type` name, perhaps without hyphens. The first one counts.
NAMED = (
    *("P-EAGLE", "EAGLE-3", "EAGLE-Llama", "DFlash2", "DFlash", "DSpark", "JetSpec", "Domino", "MTP-Draft"),
    *("MLP-Speculator", "Medusa", "Hydra", "Gemma4-Assistant", "MuseGlimmer-Assistant"),
)
# Kinds that `draftree.load_drafter` loads.
RUN = ("EAGLE-3", "P-EAGLE", "DFlash", "JetSpec", "DSpark", "DFlash2", "MTP-Draft")
# By a key of config.json.
KEYS = {
    "eagle_config": "EAGLE-3",
    "dflash_config": "DFlash",
    "markov_rank": "DSpark",
    "draft_vocab_size": "EAGLE-3",
    "medusa_num_heads": "Medusa",
    "hydra_num_heads": "Hydra",
}
# By a tensor, where the configuration is that of a plain llama.
TENSORS = {"midlayer.input_layernorm.weight": "EAGLE-3", "d2t": "EAGLE-3", "fc.weight": "EAGLE"}


def kind_of(folder: str | Path) -> str | None:
    """Return the kind of published drafter in a folder, such as "EAGLE-3"; None for anything else."""
    config: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        config = json.loads((Path(folder) / "config.json").read_text("utf-8"))
    if not isinstance(config, dict) or not config:
        return None
    speculator = str(config.get("speculators_model_type") or "")
    text = " ".join([*(config.get("architectures") or ()), speculator]).lower()
    found = [kind for kind in NAMED if kind.lower().replace("-", "") in text]
    found += [kind for key, kind in KEYS.items() if key in config]
    if found or speculator:
        return (*found, speculator)[0]
    names = set(_tensor_names(Path(folder)))
    return next((kind for name, kind in TENSORS.items() if name in names), None)


def refuse_published(folder: str | Path) -> None:
    """Refuse a folder with a published drafter where a model is expected."""
    kind = kind_of(folder)
    if kind in RUN:
        raise ValueError(
            f"{str(folder)!r} holds a published drafter ({kind}), no model: give it as the drafter (--drafter FOLDER, "
            "draftree.load_drafter) beside the model that it was trained for."
        )
    if kind is not None:
        raise ValueError(
            f"{str(folder)!r} holds a published drafter ({kind}), which draftree does not run: use lookahead, a small "
            "model with the same tokenizer, or a drafter that draftree train made."
        )


def _tensor_names(folder: Path) -> Iterator[str]:
    """Yield the tensors' names in safetensors files, and those of `TENSORS` in .bin files."""
    for file in folder.glob("*.safetensors"):
        with suppress(OSError, ValueError, struct.error), file.open("rb") as opened:
            yield from json.loads(opened.read(*struct.unpack("<Q", opened.read(8))))
    for file in folder.glob("*.bin"):
        with suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(file) as archive:
            pickled = b"".join(archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
            # A pickle has the length of a text before it.
            yield from (name for name in TENSORS if struct.pack("<I", len(name)) + name.encode() in pickled)
