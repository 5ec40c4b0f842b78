"""`model.generate(..., custom_generate=draftree.custom_generate(drafter=...))`: Hugging Face's door, draftree's loop.

Hugging Face prepares ids, logits processors and stopping criteria. The decoding loop is draftree's engine. Beams are
refused; `num_return_sequences` arrives as batch rows. Inputs besides token ids and images are refused, because
draftree's passes would not give them to the model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from draftree.acceptance import LossyRule
from draftree.by_name import as_drafter, check_drafter
from draftree.drafting.base import Drafter
from draftree.engine import Recorder, RunStats, SamplingParams
from draftree.engine.config import EngineConfig
from draftree.engine.generate import Row, check_streamer, ended, real_tokens, run_batch, seeds_of
from draftree.engine.limits import (
    check_mask,
    check_prompt,
    criteria_by_request,
    processors_by_request,
    split_criteria,
)
from draftree.engine.sampling import filler, refuse_other_methods
from draftree.grammar import Grammars, compile_grammars
from draftree.pruning import EarlyPruning
from draftree.runner import Runner, open_runner
from draftree.runner.images import Images, check_images, placeholder, split_images, take_tensors
from draftree.runner.target import CACHES, Target
from draftree.shaping import Shape

DEPTH = 6  # Largest number of frames between `generate` and the loop.
# Inputs that `generate` makes itself, or that concern its own loop and cache.
WITHOUT_EFFECT = ("cache_position", "encoder_outputs", "logits_to_keep", "use_cache")
REPEATED = ("glm46v", "glm4v", "glm4v_moe")  # families whose images' features `generate` repeats in a wrong order


def custom_generate(
    drafter: Drafter | str | None = None,
    *,
    pruner: EarlyPruning | None = None,
    shape: Shape | None = None,
    seed: int | None = None,
    strict: bool = False,
    acceptance: LossyRule | None = None,
    runner: str | Runner = "auto",
    streamer: Any = None,
    tokenizer: Any = None,
    recorder: Recorder | None = None,
    grammar: Grammars = None,
    on_stats: Callable[[RunStats], None] | None = None,
) -> Callable[..., Any]:
    """Return a decoding loop for Hugging Face's `generate`, with the options that Hugging Face does not have.

    Args:
        drafter: as in `draftree.generate`; a name makes a drafter at the first call, which later calls reuse.
        pruner, shape, seed, strict, acceptance, runner, recorder, grammar: as in `draftree.generate`.
        streamer: given here or to `generate`.
        tokenizer: needed for `generate(stop_strings=)` and for a grammar, because Hugging Face drops
            `generate(tokenizer=)`.
        on_stats: called with the run's statistics at its end.

    Returns:
        A callable for `model.generate(input_ids, custom_generate=...)`. It raises TypeError or ValueError if an option
        does not fit the model: one sentence, before any work.

    Raises:
        TypeError, ValueError: an option is wrong, or two exclude each other.
    """
    if on_stats is not None and not callable(on_stats):
        raise TypeError(f"on_stats is a {type(on_stats).__name__}: pass a function of the run's statistics, or None.")
    options: dict[str, Any] = {
        "pruner": pruner,
        "shape": shape,
        "strict": strict,
        "acceptance": acceptance,
        "recorder": recorder,
    }
    if isinstance(drafter, str):
        check_drafter(drafter)
    else:
        EngineConfig(drafter=drafter, **options)
    return _DecodingLoop(drafter, options, runner, seed, streamer, tokenizer, grammar, on_stats)


@dataclass(slots=True)
class _DecodingLoop:
    """A decoding loop in the form that Hugging Face calls; the attributes are arguments of `custom_generate`."""

    drafter: Drafter | str | None
    options: dict[str, Any]
    runner: str | Runner
    seed: int | None
    streamer: Any
    tokenizer: Any
    grammar: Grammars
    on_stats: Callable[[RunStats], None] | None

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        inputs_tensor: Tensor | None = None,
        stop_strings: str | list[str] | None = None,  # Hugging Face would need the tokenizer, which it drops.
        **model_kwargs: Any,
    ) -> Any:
        """Decode a batch; Hugging Face makes the arguments."""
        called = given_to_generate()
        streamer = called.get("streamer") if self.streamer is None else self.streamer
        with ended(streamer):
            refuse_other_methods(generation_config)
            self._check_call(called)
            opened = open_runner(model, self.runner)
            drafter = self.drafter = as_drafter(self.drafter, model, self.tokenizer)
            config = EngineConfig(drafter=drafter, runner=opened, **self.options)
            length, eos, criteria = split_criteria(stopping_criteria)
            if stop_strings is not None:
                criteria = model._merge_criteria_processor_list(self._stops(stop_strings), criteria)
            most = length if length is not None else generation_config.max_length
            check_streamer(streamer, input_ids.shape[0])
            encoder_decoder = opened.target.encoder_decoder
            own_mask = None if encoder_decoder else model_kwargs.get("attention_mask")
            encoded = (model_kwargs.get("mm_encoder_outputs") or {}).get("image")
            images, read = _images(opened.target, called.get("tensors", {}), input_ids, own_mask, encoded)
            check_inputs(input_ids, model_kwargs, encoder_decoder=encoder_decoder, read=read)
            prompts = real_tokens(input_ids, own_mask)
            new = max(1, most - input_ids.shape[1])  # Criteria are called after a token, so there is at least one.
            for prompt, own_images in zip(prompts, images, strict=True):
                check_prompt(prompt, new, opened.target.vocab_size, opened.target.max_positions)
                check_images(opened.target, prompt, own_images)
            params = self._params(opened, generation_config, len(prompts), new, eos, logits_processor, criteria)
            rows = []
            for b, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
                source = states = None
                if encoder_decoder:
                    source, states = _source(inputs_tensor, b, len(prompts), model_kwargs), _states(b, model_kwargs)
                rows.append(Row(prompt, own, input_ids[b : b + 1], source, states, images[b]))
            sequences, stats = run_batch(
                model,
                config,
                rows,
                input_ids,
                filler(generation_config, eos),
                streamer,
                prompt_streamed=self.streamer is None,  # `generate` has given the prompt to its own streamer.
            )
            if self.on_stats is not None:
                self.on_stats(stats)
            if not generation_config.return_dict_in_generate:
                return sequences
            kind = GenerateEncoderDecoderOutput if encoder_decoder else GenerateDecoderOnlyOutput
            return kind(sequences=sequences)  # type: ignore[arg-type]  # Hugging Face annotates LongTensor.

    def _check_call(self, called: dict[str, Any]) -> None:
        if called.get("cache") is not None:
            raise ValueError(
                "The KV cache (cache, or past_key_values) would neither be read nor filled, as draftree decodes on "
                "a cache of its own: leave it out and give the whole text."
            )
        if called.get("synced_gpus"):
            raise ValueError(
                "synced_gpus is for models whose parts lie with several processes (ZeRO-3, FSDP), which draftree "
                "does not drive: leave it out, or use Hugging Face's own generate."
            )
        if self.streamer is not None and called.get("streamer") is not None:
            raise ValueError("generate and draftree.custom_generate both have a streamer: give it to one of them.")

    def _stops(self, stop_strings: str | list[str]) -> StoppingCriteriaList:
        if self.tokenizer is None:
            raise ValueError(
                "stop_strings need the model's tokenizer: give it to draftree.custom_generate(tokenizer=...), "
                "as Hugging Face does not hand generate(tokenizer=...) on."
            )
        return StoppingCriteriaList([StopStringCriteria(self.tokenizer, stop_strings)])

    def _params(
        self,
        opened: Runner,
        generation_config: GenerationConfig,
        count: int,
        new: int,
        eos: tuple[int, ...],
        logits_processor: LogitsProcessorList,
        criteria: StoppingCriteriaList,
    ) -> list[SamplingParams]:
        """Return the sampling parameters of each of `count` requests."""
        grammars = compile_grammars(self.grammar, count, self.tokenizer, opened.target.vocab_size, eos)
        sample = bool(generation_config.do_sample)
        seeds = seeds_of(sample, self.seed, count)
        processors = processors_by_request(logits_processor, count)
        own_criteria = criteria_by_request(criteria, count)
        return [
            SamplingParams(
                max_new_tokens=new,
                eos_token_ids=eos,
                sample=sample,
                seed=seeds[b],
                processors=processors[b],
                criteria=own_criteria[b],
                grammar=grammars[b],
            )
            for b in range(count)
        ]


def given_to_generate() -> dict[str, Any]:
    """Return `streamer`, `synced_gpus`, `cache` and `tensors` of the running call of `generate`; {} outside of one.

    Hugging Face does not pass its streamer to a custom loop, so a reader of that streamer would wait for ever. It also
    makes an empty cache in place of a given one, and features in place of images. They are read from the frame of the
    call.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(DEPTH):
        if frame is None:
            break
        known = frame.f_locals
        if frame.f_code.co_name == "generate" and "custom_generate" in known and "generation_mode_kwargs" in known:
            held = known.get("kwargs") or {}
            caches = [held[name] for name in CACHES if held.get(name) is not None]
            given = {name: known.get(name) for name in ("streamer", "synced_gpus")}
            return given | {"cache": caches[0] if caches else None, "tensors": held}
        frame = frame.f_back
    return {}


def _images(
    target: Target, called: dict[str, Any], ids: Tensor, mask: Tensor | None, encoded: Any
) -> tuple[list[Images | None], set[str]]:
    """Return the images of each row, which `generate` repeats for several answers, and the inputs that say them."""
    left = dict(called)
    tensors = take_tensors(target, left)
    given = next((called[name] for name in ("input_ids", "inputs") if called.get(name) is not None), ids)
    copies = len(ids) // len(given)
    images = split_images(target, tensors, ids[::copies], None if mask is None else mask[::copies])
    images = [one for one in images for _ in range(copies)]
    # Hugging Face has made features and positions of images, as the model does.
    read = called.keys() - left.keys() | ({"mm_encoder_outputs", "position_ids"} if tensors else set())
    repeated = copies > 1 and target.model.config.model_type in REPEATED
    if encoded is None or not tensors or repeated:
        return images, read
    held = [row.count(placeholder(target)) for row in ids.tolist()]
    rows = [slice(end - count, end) for count, end in zip(held, accumulate(held), strict=True)]
    return [one and one.with_encoded(encoded, own) for one, own in zip(images, rows, strict=True)], read


def check_inputs(input_ids: Tensor, model_kwargs: dict[str, Any], *, encoder_decoder: bool, read: set[str]) -> None:
    """Check that `generate` passes no input that draftree would not give to the model; those of `read` it does."""
    for name, value in model_kwargs.items():
        if name in read:
            continue
        if value is None or value is False or name in WITHOUT_EFFECT:
            continue
        if name == "mm_encoder_outputs" and not value:  # `generate` adds it for text alone as well.
            continue
        if name == "attention_mask":
            if not isinstance(value, Tensor) or value.dim() != 2:
                raise ValueError("attention_mask must be [batch, length]: draftree makes the mask of its trees itself.")
        elif name in CACHES:
            if value.get_seq_length():
                raise ValueError(
                    f"{name} holds tokens already, and draftree decodes on a cache of its own: leave it out "
                    "and give the whole text."
                )
        elif name == "inputs_embeds":
            if not encoder_decoder:  # For an encoder-decoder they were the encoder's input.
                raise ValueError("inputs_embeds cannot be drafted for: give input_ids instead.")
        elif name == "position_ids":
            _check_positions(input_ids, value, model_kwargs.get("attention_mask"))
        elif name == "decoder_attention_mask":
            if not value.bool().all():
                raise ValueError(
                    "decoder_attention_mask hides tokens of decoder_input_ids, which draftree does not do: leave both "
                    "out, or start all rows with equally many tokens."
                )
        else:
            raise ValueError(f"{name} is an input that draftree's passes do not give the model: leave {name} out.")


def _check_positions(input_ids: Tensor, positions: Tensor, mask: Tensor | None) -> None:
    check_mask(input_ids, mask)
    rows, length = input_ids.shape
    if positions.shape[-1] != length or (positions.dim() == 2 and len(positions) not in (1, rows)):
        raise ValueError(
            f"attention_mask or position_ids have shape {tuple(positions.shape)} and input_ids "
            f"{tuple(input_ids.shape)}: give one value per token."
        )
    real = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
    usual = real.long().cumsum(-1) - 1
    if not bool(((positions == usual) | ~real).all()):
        raise ValueError("position_ids differ from the tokens' places in the text: leave position_ids out.")


def _states(b: int, model_kwargs: dict[str, Any]) -> Tensor:
    """Return the encoder's output of row `b`, [L, d]."""
    states: Tensor = model_kwargs["encoder_outputs"][0][b]
    mask = model_kwargs.get("attention_mask")
    return states if mask is None else states[mask[b].bool()]


def _source(inputs: Tensor | None, b: int, count: int, model_kwargs: dict[str, Any]) -> Tensor | None:
    """Return the encoder's input of row `b` of `count`, for drafters with an encoder; None if it is unknown."""
    if inputs is None or inputs.is_floating_point() or bool((inputs < 0).any()):  # Embeddings; -100 for states alone.
        return None
    mask = model_kwargs.get("attention_mask")  # It has a row per answer already.
    source = inputs[b * len(inputs) // count]
    return source if mask is None else source[mask[b].bool()]
