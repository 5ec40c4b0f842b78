"""Sampling parameters of a request, and their one builder from Hugging Face's generation options.

Options keep Hugging Face's names, meaning and defaults, so the same arguments give the same text. Options of other
decoding methods (beams, contrastive search, ...) are refused.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from draftree.engine.limits import as_ids, as_seed, split_criteria
from draftree.errors import brief, check_kind, check_least, did_you_mean, whole
from draftree.grammar import CompiledGrammar, compile_grammars
from draftree.runner.target import Target, device_of

DEFAULT_NEW_TOKENS = 128
# None means "not given" for these options. For other options it is a value, which wins over the model's config.
NOT_GIVEN_AS_NONE = frozenset(
    ("max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "eos_token_id")
)
IDS_ONLY = "draftree returns token ids and statistics only: leave it out"
BEAMS = "draftree has no beam search: leave it out"
ASSISTED = "it belongs to assisted generation: set the drafter's own options instead"
OTHER_LOOP = "give it to model.generate(custom_generate=draftree.custom_generate(...))"
# Options that would change the text in Hugging Face's loop and that draftree does not have. A config may hold them
# with their default.
OTHER_METHODS = {
    "num_beams": "draftree decodes greedily or by sampling: leave num_beams at 1",
    "penalty_alpha": "draftree has no contrastive search: leave it out",
    "dola_layers": "draftree has no DoLa decoding: leave it out",
    **dict.fromkeys(("constraints", "force_words_ids"), BEAMS),
    "prompt_lookup_num_tokens": "pass drafter=draftree.PromptLookup() instead",
    **dict.fromkeys(("assistant_early_exit", "use_mtp"), "pass a drafter instead"),
    "token_healing": "draftree has no token healing: leave it out",
    **dict.fromkeys(("output_attentions", "output_hidden_states", "output_scores", "output_logits"), IDS_ONLY),
}
# Arguments that have no effect in draftree. A config may hold them; a caller who passes one expects an effect.
NO_EFFECT = {
    **dict.fromkeys(("early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty", "low_memory"), BEAMS),
    **dict.fromkeys(("num_assistant_tokens", "num_assistant_tokens_schedule", "is_assistant"), ASSISTED),
    **dict.fromkeys(("assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind"), ASSISTED),
    **dict.fromkeys(("assistant_ensemble_weight", "max_matching_ngram_size", "speculation_type"), ASSISTED),
    "assistant_model": "give drafter=draftree.DraftModel(assistant_model) instead",
    "continuous_batching_config": "draftree batches by slots: use draftree.Engine(slots=...)",
    "return_dict_in_generate": "draftree.generate always returns an object: leave it out",
    "inputs_embeds": "draft tokens are token ids: give input_ids",
    "past_key_values": "draftree has its own KV cache: leave it out (draftree.Chat keeps the cache of a dialogue)",
    "position_ids": "they follow from attention_mask: give that",
    "token_type_ids": "draftree does not pass it on: leave it out",
    **dict.fromkeys(("logits_processor", "prefix_allowed_tokens_fn", "negative_prompt_ids"), OTHER_LOOP),
    "negative_prompt_attention_mask": OTHER_LOOP,
}
# Options that only configure Hugging Face's own loop are ignored.
OF_THE_LOOP = {"use_cache", "cache_implementation", "cache_config", "max_cache_len", "compile_config"}
OF_THE_LOOP |= {"disable_compile", "prefill_chunk_size"}
# Fields of `SamplingParams` that a request may set beside Hugging Face's options.
OF_A_REQUEST = ("drafting", "node_budget", "logprobs", "keep_trees", "prediction", "cache_salt")
OF_THE_ENGINE = {"attention_mask", "drafter", "pruner", "shape", "seed", "stopping_criteria", "streamer", "strict"}
OF_THE_ENGINE |= {"acceptance", "runner", "recorder", "grammar"}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping options of one request.

    Attributes:
        max_new_tokens: limit of new tokens.
        eos_token_ids: tokens that end the text (they are emitted).
        sample: sample tokens; False decodes greedily.
        seed: of the sampling noise, at most 64 bits; None uses torch's default generator, as Hugging Face does.
        processors: Hugging Face logits processors, in order. They belong to this request alone.
        criteria: custom stopping criteria, called after each token.
        drafting: False answers this request without draft tokens.
        node_budget: limit of draft tokens in a step; None leaves it to the shape.
        logprobs: number of most probable tokens to return with each new token (`Emitted.scores`); None for no scores.
        keep_trees: whether `Request.trees` gets each step's draft tree.
        prediction: token ids that the text may follow in part. Drafters that copy, such as `Lookahead`, draft from it.
        grammar: constraint of the answer, compiled for this model; None for none.
        cache_salt: requests of another salt neither draft from this text nor reuse its keys and values.

    Raises:
        TypeError, ValueError: a seed that is not an integer of at most 64 bits, or a negative or fractional count.
    """

    max_new_tokens: int = 128
    eos_token_ids: tuple[int, ...] = ()
    sample: bool = False
    seed: int | None = None
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    criteria: StoppingCriteriaList = field(default_factory=StoppingCriteriaList)
    drafting: bool = True
    node_budget: int | None = None
    logprobs: int | None = None
    keep_trees: bool = False
    prediction: tuple[int, ...] = ()
    cache_salt: str | None = None
    grammar: CompiledGrammar | None = None

    def __post_init__(self) -> None:
        if self.seed is not None:
            object.__setattr__(self, "seed", as_seed(self.seed))
        object.__setattr__(self, "eos_token_ids", as_ids(self.eos_token_ids))
        for name in ("max_new_tokens", "node_budget", "logprobs"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, whole(name, value))
        object.__setattr__(self, "processors", LogitsProcessorList(self.processors))
        object.__setattr__(self, "criteria", StoppingCriteriaList(self.criteria))
        check_least(0, node_budget=self.node_budget, logprobs=self.logprobs)


@dataclass(slots=True)
class Options:
    """Checked generation options of one call."""

    config: GenerationConfig  # Hugging Face's config with its special tokens prepared.
    max_new_tokens: int | None  # Limit of new tokens; None if neither caller nor config sets it.
    max_length: int | None  # Limit of the total with the (padded) prompt; `max_new_tokens` wins over it.
    pad_token_id: int  # Fills short rows.
    criteria: StoppingCriteriaList  # Custom stopping criteria, without EOS and length.
    eos_token_ids: tuple[int, ...]  # Tokens that end a text.
    criterion_length: int | None  # Limit of the total set by a `MaxLengthCriteria`, which wins over the options.

    def default_mask(self, input_ids: Tensor) -> Tensor:
        """Return the attention mask of prompts [batch, length] given without one, as Hugging Face makes it.

        The pad token is hidden unless it is also an EOS token.
        """
        pad, ends = as_ids(self.config._pad_token_tensor), as_ids(self.config._eos_token_tensor)
        return torch.ones_like(input_ids) if not pad or pad[0] in ends else input_ids.ne(pad[0]).long()

    def new_tokens(self, padded: int, longest: int, limit: int | None) -> int:
        """Return the limit of new tokens for prompts of `padded` tokens, `longest` of them real, in this context."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        if self.max_length is not None:
            if self.max_length <= padded:
                raise ValueError(
                    f"max_length={self.max_length} leaves no room behind a prompt of {padded} tokens: raise it, or "
                    "set max_new_tokens."
                )
            return self.max_length - padded
        return DEFAULT_NEW_TOKENS if limit is None else max(1, min(DEFAULT_NEW_TOKENS, limit - longest))


def read_options(
    model: Any,
    generation_config: GenerationConfig | None,
    stopping_criteria: StoppingCriteriaList | Sequence[StoppingCriteria] | None,
    tokenizer: Any,
    given: dict[str, Any],
) -> Options:
    """Merge the caller's options over `generation_config` over the model's own config, and check them."""
    _refuse_unknown(given)
    check_kind(GenerationConfig, "a GenerationConfig, or options by name", generation_config=generation_config)
    check_kind(Iterable, "a list of them", stopping_criteria=stopping_criteria)
    counts = {name: given.get(name) for name in ("max_new_tokens", "num_return_sequences")}
    check_least(1, math.inf, **counts)
    eos = given.pop("eos_token_id", None)
    if generation_config is None and "do_sample" not in given and model.generation_config.do_sample:
        warnings.warn(
            "The model's generation_config samples (do_sample=True), so draftree samples, as Hugging Face's generate "
            "does: pass do_sample=False for greedy decoding.",
            stacklevel=3,
        )
    temperature = given.pop("temperature", None)  # Hugging Face's message for 0 has several lines.
    with _one_sentence():
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
    # The merged config has a max_length of 20 by default, so the values that somebody set are read here.
    lengths = [given.get("max_length"), getattr(generation_config, "max_length", None)]
    lengths.append(model.generation_config.max_length)
    max_length = next((whole("max_length", n) for n in lengths if n is not None), None)
    new = None if config.max_new_tokens is None else whole("max_new_tokens", config.max_new_tokens)
    return Options(config, new, max_length, filler(config, ids), custom, ids, length)


@contextmanager
def _one_sentence() -> Iterator[None]:
    """Turn Hugging Face's errors about malformed options into one sentence."""
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
        if name in NO_EFFECT:
            raise TypeError(f"{name} has no effect here: {NO_EFFECT[name]}.")
        if name.startswith(("pixel_", "image_", "video_", "audio_", "input_features", "mm_")):  # Of a processor.
            raise TypeError(f"draftree does not read {name!r}: leave it out, or use Hugging Face's own generate.")
        if name not in known | set(OTHER_METHODS) | OF_THE_LOOP:
            if name in OF_THE_ENGINE:
                raise TypeError(
                    f"{name} belongs to draftree.generate or draftree.Engine(...) and not to a single request: give it "
                    "there."
                )
            raise TypeError(f"Unknown option {name!r}.{did_you_mean(name, sorted(known | OF_THE_ENGINE))}")


def filler(config: GenerationConfig, eos: tuple[int, ...]) -> int:
    """Return the token that fills short rows: the config's pad token or first EOS token, else the first of `eos`."""
    prepared = config._pad_token_tensor
    return (*eos, 0)[0] if prepared is None else int(prepared)


def refuse_other_methods(config: GenerationConfig) -> None:
    """Raise a ValueError if `config` asks for another decoding method."""
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


def params_of(
    target: Target,
    prompt: Sequence[int],
    given: dict[str, Any],
    encoder_input: Tensor | None = None,
    padded_prompt: Tensor | None = None,
) -> SamplingParams:
    """Build the parameters of one request from the options of `generate`.

    Args:
        given: options by name: those of Hugging Face's GenerationConfig, `seed`, `generation_config`,
            `stopping_criteria`, `tokenizer`, `grammar`, and the fields of `SamplingParams` in `OF_A_REQUEST`.
        encoder_input: LongTensor [L], input of the encoder; None for decoder-only models.
        padded_prompt: LongTensor [1, L], the prompt as processors see it; None for `prompt`.
    """
    left = {name: value for name, value in given.items() if value is not None or name not in NOT_GIVEN_AS_NONE}
    own = {name: left.pop(name) for name in OF_A_REQUEST if name in left}
    seed, tokenizer, grammar = (left.pop(name, None) for name in ("seed", "tokenizer", "grammar"))
    config, criteria = left.pop("generation_config", None), left.pop("stopping_criteria", None)
    options = read_options(target.model, config, criteria, tokenizer, left)
    if int(options.config.num_return_sequences or 1) > 1:
        raise ValueError("num_return_sequences: one request has one answer; add the prompt again for another.")
    (compiled,) = compile_grammars(grammar, 1, tokenizer, target.vocab_size, options.eos_token_ids)
    read = padded_prompt
    if read is None:
        read = torch.tensor([list(prompt)], dtype=torch.long, device=target.device)
    encoder_ids: Tensor | None = read
    if target.encoder_decoder:
        encoder_ids = None if encoder_input is None else encoder_input[None]
    made = params_for(
        target.model,
        options,
        max_new_tokens=options.new_tokens(len(prompt), len(prompt), target.max_positions),
        padded_length=read.shape[1],
        seed=seed if options.config.do_sample else None,
        encoder_ids=encoder_ids,
        grammar=compiled,
    )
    return replace(made, **own)


def params_for(
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
    """Build the parameters of one request from checked options, with logits processors of its own.

    Args:
        padded_length: length of the prompt as processors see it.
        encoder_ids: LongTensor [1, L], the input of the encoder (of the decoder if there is none).
        mask: [1, padded_length], 1 for real tokens of a padded prompt; None if all are real.
        criteria: the request's own; None for those of the options.
    """
    config = copy.copy(options.config)
    config.max_length = padded_length + max_new_tokens  # Some processors count from the end.
    if config.min_new_tokens is not None:  # It wins over min_length, even if it is 0.
        config.min_length = padded_length + config.min_new_tokens
    if config._eos_token_tensor is None:  # The penalty would raise the scores of EOS tokens.
        config.exponential_decay_length_penalty = None
    with _one_sentence():
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
        max_new_tokens=max_new_tokens if length is None else max(1, length - padded_length),
        eos_token_ids=options.eos_token_ids,
        sample=bool(config.do_sample),
        seed=seed,
        processors=processors,
        criteria=options.criteria if criteria is None else criteria,
        grammar=grammar,
    )
