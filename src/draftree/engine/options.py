"""From Hugging Face's generation options to an engine's rules, one set per request.

Options keep Hugging Face's names, meaning and defaults, so that the same arguments give the same text here and there.
What an option asks of other decoding methods (beams, assistants, contrastive search) is refused, never ignored.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from draftree.engine.limits import as_ids
from draftree.engine.request import Rules

DEFAULT_NEW_TOKENS = 128
OTHER_METHODS = {
    "num_beams": "draftree decodes greedily or by sampling: leave num_beams at 1",
    "penalty_alpha": "draftree has no contrastive search: leave penalty_alpha out",
    "dola_layers": "draftree has no DoLa decoding: leave dola_layers out",
    "prompt_lookup_num_tokens": "pass drafter=draftree.PromptLookup() instead of prompt_lookup_num_tokens",
    "assistant_early_exit": "pass a drafter instead of assistant_early_exit",
    "token_healing": "draftree does no token healing: leave token_healing out",
    "output_attentions": "draftree returns ids and statistics only: leave output_attentions out",
    "output_hidden_states": "draftree returns ids and statistics only: leave output_hidden_states out",
    "output_scores": "draftree returns ids and statistics only: leave output_scores out",
    "output_logits": "draftree returns ids and statistics only: leave output_logits out",
}
# Options of Hugging Face that say how its own loop runs; they do not change the text, and our loop has its own.
OF_THE_LOOP = {"use_cache", "cache_implementation", "cache_config", "compile_config", "disable_compile"}


@dataclass(slots=True)
class Options:
    """A checked generation config and what is needed to make rules of it.

    Attributes:
        config: Hugging Face's config with its special tokens prepared.
        max_new_tokens: most tokens to emit; None where neither caller nor config says.
        pad_token_id: what fills short rows.
        criteria: custom stopping criteria, EOS and length taken out.
        eos_token_ids: tokens that end a text.
    """

    config: GenerationConfig
    max_new_tokens: int | None
    pad_token_id: int
    criteria: StoppingCriteriaList
    eos_token_ids: tuple[int, ...]


def read_options(
    model: Any,
    generation_config: GenerationConfig | None,
    stopping_criteria: StoppingCriteriaList | Sequence[StoppingCriteria] | None,
    tokenizer: Any,
    given: dict[str, Any],
) -> Options:
    """Merge the caller's options over the generation config over the model's own, and check them.

    Args:
        model: the model.
        generation_config: the caller's config, or None.
        stopping_criteria: custom criteria, asked after every token.
        tokenizer: needed for `stop_strings`.
        given: options by name; None means 'not given'.

    Raises:
        TypeError: an option that does not exist.
        ValueError: one that asks for what draftree does not do, or a value out of range.
    """
    given = {name: value for name, value in given.items() if value is not None}
    known = set(GenerationConfig().to_dict()) | set(OTHER_METHODS) | {"stop_strings"}
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"Unknown option {name!r}.{hint}")
    eos = given.pop("eos_token_id", None)
    if isinstance(eos, Sequence) and not eos:
        eos = ()
    if generation_config is None:
        given.setdefault("do_sample", False)
    config, left = model._prepare_generation_config(copy.deepcopy(generation_config), **given)
    if left:
        raise TypeError(f"Unknown option {next(iter(left))!r}.")
    refuse_other_methods(config)
    _check_ranges(config)
    if eos is not None:
        config.eos_token_id = list(as_ids(eos)) or None
    model._prepare_special_tokens(config, True, device=model.device)
    criteria = StoppingCriteriaList()
    if stopping_criteria is not None:
        criteria = StoppingCriteriaList(list(stopping_criteria))
    config_for_criteria = copy.copy(config)
    config_for_criteria.max_length = None
    merged = model._get_stopping_criteria(config_for_criteria, criteria, tokenizer=tokenizer)
    _, ids, custom = split_criteria(merged)
    new = given.get("max_new_tokens")
    if new is None and generation_config is not None:
        new = generation_config.max_new_tokens
    if new is None and "max_length" in given:
        new = -int(given["max_length"])  # resolved against the prompt by the caller
    return Options(config, new, _pad(config, ids), custom, ids)


def _pad(config: GenerationConfig, eos: tuple[int, ...]) -> int:
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    return eos[0] if eos else 0


def split_criteria(
    criteria: StoppingCriteriaList,
) -> tuple[int | None, tuple[int, ...], StoppingCriteriaList]:
    """(max length, EOS ids, the rest): what the engine checks itself, and what it has to ask."""
    length: int | None = None
    eos: tuple[int, ...] = ()
    rest = StoppingCriteriaList()
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            length = criterion.max_length if length is None else min(length, criterion.max_length)
        elif type(criterion) is EosTokenCriteria:
            eos += as_ids(torch.as_tensor(criterion.eos_token_id).flatten().tolist())
        else:
            rest.append(criterion)
    return length, eos, rest


def refuse_other_methods(config: GenerationConfig) -> None:
    """Raise ValueError where `config` asks for a decoding method that is not ours."""
    for name, advice in OTHER_METHODS.items():
        value = getattr(config, name, None)
        if value and not (name == "num_beams" and value == 1):
            raise ValueError(f"{name}={value} is not supported: {advice}.")


def _check_ranges(config: GenerationConfig) -> None:
    temperature = config.temperature
    if config.do_sample and temperature is not None and not temperature > 0:
        raise ValueError(f"temperature is {temperature}: give a number over 0, or do_sample=False for greedy decoding.")
    if config.num_return_sequences is not None and config.num_return_sequences < 1:
        raise ValueError(f"num_return_sequences is {config.num_return_sequences}: give at least 1.")


def rules_for(
    model: Any,
    options: Options,
    *,
    max_new_tokens: int,
    padded_length: int,
    seed: int | None,
    encoder_ids: Tensor | None = None,
) -> Rules:
    """The rules of one request; its logits processors are its own (some keep state)."""
    config = options.config
    processors = model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=padded_length,
        encoder_input_ids=encoder_ids,
        logits_processor=LogitsProcessorList(),
        device=str(model.device),
        model_kwargs={},
    )
    return Rules(
        max_new_tokens=max_new_tokens,
        eos_token_ids=options.eos_token_ids,
        sample=bool(config.do_sample),
        seed=seed,
        processors=processors,
        criteria=options.criteria,
    )
