"""From Hugging Face's generation options to an engine's params, one set per request.

Options keep Hugging Face's names, meaning and defaults, so that the same arguments give the same text here and there.
An option of other decoding methods (beams, assistants, contrastive search) is refused, never ignored.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from draftree.engine.constraints import compile_grammars
from draftree.engine.criteria import split_criteria
from draftree.engine.limits import as_ids, check_tokens
from draftree.engine.request import SamplingParams
from draftree.errors import brief, check_kind, check_least, did_you_mean, whole
from draftree.grammar import CompiledGrammar
from draftree.runner.target import Target, device_of

DEFAULT_NEW_TOKENS = 128
# Arguments of `generate`: None of one of them is 'not given'. Of other options it is Hugging Face's None, which wins
# over the model's own.
NOT_GIVEN_AS_NONE = frozenset(
    ("max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "eos_token_id")
)
IDS_ONLY = "draftree returns ids and statistics only"
OTHER_METHODS = {
    "num_beams": "draftree decodes greedily or by sampling: leave num_beams at 1",
    "penalty_alpha": "draftree has no contrastive search: leave penalty_alpha out",
    "dola_layers": "draftree has no DoLa decoding: leave dola_layers out",
    "constraints": "draftree has no constrained beam search: leave constraints out",
    "force_words_ids": "draftree has no constrained beam search: leave force_words_ids out",
    "prompt_lookup_num_tokens": "pass drafter=draftree.PromptLookup() instead of prompt_lookup_num_tokens",
    "assistant_early_exit": "pass a drafter instead of assistant_early_exit",
    "use_mtp": "pass a drafter instead of use_mtp",
    "token_healing": "draftree does no token healing: leave token_healing out",
    "output_attentions": f"{IDS_ONLY}: leave output_attentions out",
    "output_hidden_states": f"{IDS_ONLY}: leave output_hidden_states out",
    "output_scores": f"{IDS_ONLY}: leave output_scores out",
    "output_logits": f"{IDS_ONLY}: leave output_logits out",
}
# Options that do nothing without one of the above. A config may carry them; whoever passes one expects an effect.
PARTS_OF_OTHER_METHODS = {
    **dict.fromkeys(
        ("early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty", "low_memory"),
        "it belongs to beam search, which draftree does not do: leave it out",
    ),
    **dict.fromkeys(
        (
            "num_assistant_tokens",
            "num_assistant_tokens_schedule",
            "assistant_confidence_threshold",
            "assistant_lookbehind",
            "target_lookbehind",
            "assistant_ensemble_weight",
            "max_matching_ngram_size",
            "speculation_type",
            "is_assistant",
        ),
        "it belongs to Hugging Face's assisted generation: set the drafter's own options instead",
    ),
    "assistant_model": "give drafter=draftree.DraftModel(assistant_model) instead",
    "continuous_batching_config": "draftree batches by slots: leave it out, or use draftree.Engine(slots=...)",
    "return_dict_in_generate": "draftree.generate always returns an object: leave it out",
}
# What Hugging Face's `generate` takes that is no option, and hands to our loop.
ONLY_BY_CUSTOM_GENERATE = (
    "logits_processor",
    "prefix_allowed_tokens_fn",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
)
# Options of Hugging Face that set how its own loop runs; they do not change the text, and our loop has its own.
OF_THE_LOOP = (
    "use_cache",
    "cache_implementation",
    "cache_config",
    "max_cache_len",
    "compile_config",
    "disable_compile",
    "prefill_chunk_size",
)
# Inputs of a model that `model.generate` takes.
NOT_READ = {
    "inputs_embeds": "drafts are token ids: give input_ids",
    "past_key_values": "decoding has a KV cache of its own: leave it out (draftree.Chat keeps that of a dialogue)",
    "position_ids": "they follow from attention_mask: give that",
    "token_type_ids": "draftree does not pass it on: leave it out",
}
# Fields of `SamplingParams` that may stand beside them for a request of an engine.
OF_A_REQUEST = ("drafting", "node_budget", "logprobs", "keep_trees", "prediction", "cache_salt")
OURS = (
    "attention_mask",
    "drafter",
    "pruner",
    "shape",
    "seed",
    "stopping_criteria",
    "streamer",
    "strict",
    "acceptance",
    "runner",
    "recorder",
    "grammar",
)


@dataclass(slots=True)
class Options:
    """A checked generation config and what is needed to make rules of it."""

    config: GenerationConfig  # Hugging Face's config with its special tokens prepared
    max_new_tokens: int | None  # most tokens to emit; None where neither caller nor config sets it
    max_length: int | None  # the same as a total with the (padded) prompt; `max_new_tokens` wins over it
    pad_token_id: int  # what fills short rows
    criteria: StoppingCriteriaList  # custom stopping criteria, EOS and length taken out
    eos_token_ids: tuple[int, ...]  # tokens that end a text
    criterion_length: int | None  # total with the (padded) prompt by a `MaxLengthCriteria`, which wins over the options

    def default_mask(self, input_ids: Tensor) -> Tensor:
        """The attention mask of prompts [batch, length] that come without one, as Hugging Face makes it.

        The pad token is hidden, unless it is an EOS token of the config too; those of criteria only end texts.
        """
        pad, ends = as_ids(self.config._pad_token_tensor), as_ids(self.config._eos_token_tensor)
        return torch.ones_like(input_ids) if not pad or pad[0] in ends else input_ids.ne(pad[0]).long()

    def new_tokens(self, padded: int, longest: int, limit: int | None) -> int:
        """Tokens to emit behind prompts of `padded` tokens, `longest` of them real, in a context of `limit`.

        Raises:
            ValueError: a `max_length` that the prompt fills.
        """
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        if self.max_length is not None:
            if self.max_length <= padded:
                raise ValueError(
                    f"max_length={self.max_length} leaves no room behind a prompt of {padded} tokens: raise it, or "
                    "set max_new_tokens."
                )
            return self.max_length - padded
        # No length is given: as many as fit.
        return DEFAULT_NEW_TOKENS if limit is None else max(1, min(DEFAULT_NEW_TOKENS, limit - longest))


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
        stopping_criteria: custom criteria, called after every token.
        tokenizer: needed for `stop_strings`.
        given: options by name.

    Raises:
        TypeError: an option that does not exist.
        ValueError: one that asks for what draftree does not do, or a value out of range.
    """
    _refuse_unknown(given)
    check_kind(GenerationConfig, "a GenerationConfig, or options by name", generation_config=generation_config)
    check_kind(Iterable, "a list of them", stopping_criteria=stopping_criteria)
    counts = {name: given.get(name) for name in ("max_new_tokens", "num_return_sequences")}
    check_least(1, math.inf, **counts)
    eos = given.pop("eos_token_id", None)
    if generation_config is None and "do_sample" not in given and model.generation_config.do_sample:
        warnings.warn(
            "The model's own generation_config draws tokens (do_sample=True), and so does draftree, as Hugging Face's "
            "generate would: pass do_sample=False for the likeliest ones.",
            stacklevel=3,
        )
    temperature = given.pop("temperature", None)  # Hugging Face refuses 0 in a paragraph, we in a sentence
    with _in_a_sentence():
        config, left = model._prepare_generation_config(generation_config, **given)
    if temperature is not None:
        config.temperature = temperature
    refuse_other_methods(config)
    if left:
        raise TypeError(f"Unknown option {next(iter(left))!r}.")
    _check_ranges(config)
    if eos is not None:
        config.eos_token_id = list(as_ids(eos)) or None
    model._prepare_special_tokens(config, True, device=device_of(model))
    criteria = StoppingCriteriaList()
    if stopping_criteria is not None:
        criteria = StoppingCriteriaList(list(stopping_criteria))
    config_for_criteria = copy.copy(config)
    config_for_criteria.max_length = None
    merged = model._get_stopping_criteria(config_for_criteria, criteria, tokenizer=tokenizer)
    length, ids, custom = split_criteria(merged)
    # The merged config holds a max_length of 20 where nobody set one; whoever did is looked up here.
    lengths = [given.get("max_length"), getattr(generation_config, "max_length", None)]
    lengths.append(model.generation_config.max_length)
    max_length = next((whole("max_length", n) for n in lengths if n is not None), None)
    new = None if config.max_new_tokens is None else whole("max_new_tokens", config.max_new_tokens)
    return Options(config, new, max_length, filler(config, ids), custom, ids, length)


@contextmanager
def _in_a_sentence() -> Iterator[None]:
    """A context in which Hugging Face reads options; what it stumbles over is told in one sentence."""
    try:
        yield
    except (AttributeError, IndexError) as error:
        raise ValueError(
            f"Hugging Face cannot read one of the options ({brief(error)}): give them as its GenerationConfig says."
        ) from error


@lru_cache(maxsize=1)
def _known() -> frozenset[str]:
    usual: Any = GenerationConfig()  # type: ignore[no-untyped-call]
    names = {name for name in usual.to_dict() if not name.startswith("_")}
    return frozenset(names - {"transformers_version"})


def _refuse_unknown(given: dict[str, Any]) -> None:
    known = _known()
    for name in given:
        if name in PARTS_OF_OTHER_METHODS:
            raise ValueError(f"{name} has no effect here: {PARTS_OF_OTHER_METHODS[name]}.")
        if name in NOT_READ:
            raise TypeError(f"draftree.generate takes no {name}, as {NOT_READ[name]}.")
        if name in ONLY_BY_CUSTOM_GENERATE:
            raise TypeError(
                f"draftree.generate takes no {name}: give it to model.generate(custom_generate="
                "draftree.custom_generate(...))."
            )
        if name not in known | set(OTHER_METHODS) | set(OF_THE_LOOP):
            if name in OURS:
                raise TypeError(
                    f"{name} belongs to draftree.generate or draftree.Engine(...) and not to a single request: give it "
                    "there."
                )
            raise TypeError(f"Unknown option {name!r}.{did_you_mean(name, sorted(known | set(OURS)))}")


def filler(config: GenerationConfig, eos: tuple[int, ...]) -> int:
    """The token that fills short rows: the config's pad token or its first EOS token, as with Hugging Face.

    Where it has neither, the first of `eos`, which end texts by criteria. Its special tokens must have been prepared.
    """
    prepared = config._pad_token_tensor
    return (*eos, 0)[0] if prepared is None else int(prepared)


def refuse_other_methods(config: GenerationConfig) -> None:
    """Raise ValueError where `config` asks for a decoding method that is not ours."""
    for name, advice in OTHER_METHODS.items():
        value = getattr(config, name, None)
        if value and not (name == "num_beams" and value == 1):
            raise ValueError(f"{name}={value} is not supported: {advice}.")


def _check_ranges(config: GenerationConfig) -> None:
    temperature = config.temperature
    numbers = {name: getattr(config, name) for name in ("temperature", "top_p", "repetition_penalty", "max_time")}
    check_kind(Real, "a number", **numbers)
    check_least(1, math.inf, num_return_sequences=config.num_return_sequences)
    if config.do_sample and temperature is not None and not temperature > 0:
        raise ValueError(f"temperature is {temperature}: give a number over 0, or do_sample=False for greedy decoding.")
    if config.do_sample and config.top_p is not None and not 0 <= config.top_p <= 1:
        raise ValueError(f"top_p is {config.top_p}: give a probability from 0 to 1.")


def rules_of(
    target: Target,
    prompt: Sequence[int],
    given: dict[str, Any],
    encoder_input: Tensor | None = None,
    padded_prompt: Tensor | None = None,
) -> SamplingParams:
    """The rules of one request from options as `generate` takes them.

    Args:
        target: of the engine.
        prompt: token ids.
        given: options by name: those of Hugging Face's GenerationConfig, and `seed`, `generation_config`,
            `stopping_criteria`, `tokenizer`, `grammar`, and the fields of `SamplingParams` in `OF_A_REQUEST`.
        encoder_input: LongTensor [L], what an encoder reads; None for decoder-only models.
        padded_prompt: LongTensor [1, L], what processors see as the prompt; None for `prompt`.

    Raises:
        TypeError, ValueError: an option that does not exist, or a value out of range.
    """
    left = {name: value for name, value in given.items() if value is not None or name not in NOT_GIVEN_AS_NONE}
    own = {name: left.pop(name) for name in OF_A_REQUEST if name in left}
    seed, tokenizer, grammar = (left.pop(name, None) for name in ("seed", "tokenizer", "grammar"))
    config, criteria = left.pop("generation_config", None), left.pop("stopping_criteria", None)
    options = read_options(target.model, config, criteria, tokenizer, left)
    if int(options.config.num_return_sequences or 1) > 1:
        raise ValueError("num_return_sequences: one request has one answer; add the prompt again for another.")
    check_tokens(options.config, target.vocab_size)
    fit = tokenizer, target.vocab_size, options.eos_token_ids, options.config.min_new_tokens
    (compiled,) = compile_grammars(grammar, 1, *fit)
    read = padded_prompt
    if read is None:
        read = torch.tensor([list(prompt)], dtype=torch.long, device=target.device)
    source: Tensor | None = read  # what processors of an encoder's ids look at
    if target.encoder_decoder:
        source = None if encoder_input is None else encoder_input[None]
    made = rules_for(
        target.model,
        options,
        max_new_tokens=options.new_tokens(len(prompt), len(prompt), target.max_positions),
        padded_length=read.shape[1],
        seed=seed if options.config.do_sample else None,
        encoder_ids=source,
        grammar=compiled,
    )
    return replace(made, **own)


def rules_for(
    model: Any,
    options: Options,
    *,
    max_new_tokens: int,
    padded_length: int,
    seed: int | None,
    encoder_ids: Tensor | None = None,
    mask: Tensor | None = None,
    grammar: CompiledGrammar | None = None,
    criteria: StoppingCriteriaList | None = None,
) -> SamplingParams:
    """The rules of one request; its logits processors are its own (some keep state).

    Args:
        model: the model.
        options: of the call.
        max_new_tokens: most tokens to emit.
        padded_length: length of what processors see as the prompt.
        seed: of the noise.
        encoder_ids: LongTensor [1, L], the input of the encoder (or else of the decoder).
        mask: [1, padded_length], which of a padded prompt's tokens are real; None where all are.
        grammar: what the answer may say; None for anything.
        criteria: the request's own; None for those of the options.
    """
    config = copy.copy(options.config)
    config.max_length = padded_length + max_new_tokens  # some processors count from the end
    if config.min_new_tokens is not None:  # it wins over min_length, also where it is 0
        config.min_length = padded_length + config.min_new_tokens
    if config._eos_token_tensor is None:  # whose scores it raises
        config.exponential_decay_length_penalty = None
    with _in_a_sentence():
        processors = model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=padded_length,
            encoder_input_ids=encoder_ids,
            logits_processor=LogitsProcessorList(),
            device=str(device_of(model)),
            model_kwargs={} if mask is None else {"attention_mask": mask},
        )
    length = options.criterion_length
    return SamplingParams(
        max_new_tokens=max_new_tokens if length is None else max(1, length - padded_length),  # asked after a token
        eos_token_ids=options.eos_token_ids,
        sample=bool(config.do_sample),
        seed=seed,
        processors=processors,
        criteria=options.criteria if criteria is None else criteria,
        grammar=grammar,
    )
