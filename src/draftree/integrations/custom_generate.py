"""`model.generate(..., custom_generate=draftree.custom_generate(drafter=...))`: Hugging Face's door, our loop.

Hugging Face prepares ids, logits processors and stopping criteria as always; the decoding loop in the middle is
draftree's engine. Beams are refused; `num_return_sequences` arrives as batch rows and works. What a model would read
besides token ids is refused, as our passes would not show it to the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from draftree.acceptance import LossyRule
from draftree.drafting.base import Drafter
from draftree.engine import Recorder, RunStats, SamplingParams
from draftree.engine.config import EngineConfig
from draftree.engine.criteria import criteria_by_request, split_criteria
from draftree.engine.generate import Row, check_streamer, ended, real_tokens, run_batch, seeds_of
from draftree.engine.limits import check_prompt, check_tokens
from draftree.engine.sampling import filler, refuse_other_methods
from draftree.grammar import Grammars, compile_grammars
from draftree.integrations.batched_processors import processors_by_request
from draftree.integrations.caller import given_to_generate
from draftree.integrations.model_inputs import check_inputs
from draftree.pruning import EarlyPruning
from draftree.runner import Runner, open_runner
from draftree.shaping import Shape


def custom_generate(
    drafter: Drafter | None = None,
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
    """A decoding loop for Hugging Face's `generate`, with all that `draftree.generate` takes and Hugging Face does not.

    Args:
        drafter, pruner, shape, seed, strict, acceptance, runner, recorder, grammar: as of `draftree.generate`.
        streamer: given here or to `generate`.
        tokenizer: needed for `generate(stop_strings=)` and for a grammar; Hugging Face drops `generate(tokenizer=)`
            likewise.
        on_stats: called with the run's statistics when it is done.

    Returns:
        A callable for `model.generate(input_ids, custom_generate=...)`. That raises TypeError or ValueError where one
        of these does not fit the model, or what else `generate` was given: one sentence, before any work.

    Raises:
        TypeError, ValueError: one of these is not what it should be, or does not go with the others.
    """
    if on_stats is not None and not callable(on_stats):
        raise TypeError(f"on_stats is a {type(on_stats).__name__}: pass a function of the run's statistics, or None.")

    config = EngineConfig(
        drafter=drafter,
        pruner=pruner,
        shape=shape,
        strict=strict,
        acceptance=acceptance,
        recorder=recorder,
    )

    def loop(
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        inputs_tensor: Tensor | None = None,
        stop_strings: str | list[str] | None = None,  # named here, or Hugging Face would ask for the tokenizer it drops
        **model_kwargs: Any,
    ) -> Any:
        called = given_to_generate()
        follower = called.get("streamer") if streamer is None else streamer
        with ended(follower):
            refuse_other_methods(generation_config)
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
            if streamer is not None and called.get("streamer") is not None:
                raise ValueError("generate and draftree.custom_generate both have a streamer: give it to one of them.")
            opened = open_runner(model, runner)
            target = opened.target
            length, eos, criteria = split_criteria(stopping_criteria)
            if stop_strings is not None:
                if tokenizer is None:
                    raise ValueError(
                        "stop_strings need the model's tokenizer: give it to draftree.custom_generate(tokenizer=...), "
                        "as Hugging Face does not hand generate(tokenizer=...) on."
                    )
                stops = StoppingCriteriaList([StopStringCriteria(tokenizer, stop_strings)])
                criteria = model._merge_criteria_processor_list(stops, criteria)  # a caller's own of the kind wins
            most = length if length is not None else generation_config.max_length
            new = max(1, most - input_ids.shape[1])  # criteria are asked after a token, so that one comes in any case
            count = input_ids.shape[0]
            check_inputs(input_ids, model_kwargs, encoder_decoder=target.encoder_decoder)
            own_mask = None if target.encoder_decoder else model_kwargs.get("attention_mask")  # else of the source
            prompts = real_tokens(input_ids, own_mask)
            check_tokens(generation_config, target.vocab_size)
            for prompt in prompts:
                check_prompt(prompt, new, target.vocab_size, target.max_positions)
            check_streamer(follower, count)
            processors = processors_by_request(logits_processor, count)
            own_criteria = criteria_by_request(criteria, count)
            grammars = compile_grammars(
                grammar, count, tokenizer, target.vocab_size, eos, generation_config.min_new_tokens
            )
            sample = bool(generation_config.do_sample)
            seeds = seeds_of(sample, seed, count)
            rows = []
            for b, prompt in enumerate(prompts):
                params = SamplingParams(
                    max_new_tokens=new,
                    eos_token_ids=eos,
                    sample=sample,
                    seed=seeds[b],
                    processors=processors[b],
                    criteria=own_criteria[b],
                    grammar=grammars[b],
                )
                source = states = None
                if target.encoder_decoder:
                    source, states = _source(inputs_tensor, b, count, model_kwargs), _states(b, model_kwargs)
                rows.append(Row(prompt, params, input_ids[b : b + 1], source, states))
            sequences, stats = run_batch(
                model,
                replace(config, runner=opened),
                rows,
                input_ids,
                filler(generation_config, eos),
                follower,
                prompt_streamed=streamer is None,  # `generate` has given its own streamer the prompt
            )
            if on_stats is not None:
                on_stats(stats)
            if not generation_config.return_dict_in_generate:
                return sequences
            kind = GenerateEncoderDecoderOutput if target.encoder_decoder else GenerateDecoderOnlyOutput
            return kind(sequences=sequences)  # type: ignore[arg-type]  # Hugging Face annotates LongTensor

    return loop


def _states(b: int, model_kwargs: dict[str, Any]) -> Tensor:
    """What the encoder has made of row `b`, [L, d]."""
    states: Tensor = model_kwargs["encoder_outputs"][0][b]
    mask = model_kwargs.get("attention_mask")
    return states if mask is None else states[mask[b].bool()]


def _source(inputs: Tensor | None, b: int, count: int, model_kwargs: dict[str, Any]) -> Tensor | None:
    """What the encoder has read for row `b` of `count`, for drafters with an encoder of their own; None if unknown."""
    if inputs is None or inputs.is_floating_point() or bool((inputs < 0).any()):  # embeddings; -100: states alone
        return None
    mask = model_kwargs.get("attention_mask")  # expanded already where a prompt has several answers
    source = inputs[b * len(inputs) // count]
    return source if mask is None else source[mask[b].bool()]


Drafter.decoding_loop = staticmethod(custom_generate)
