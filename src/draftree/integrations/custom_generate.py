"""`model.generate(..., custom_generate=draftree.custom_generate(drafter=...))`: Hugging Face's door, our loop.

Hugging Face prepares ids, logits processors and stopping criteria as always; the decoding loop in the middle is
draftree's engine. Beams are refused; `num_return_sequences` arrives as batch rows and works.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from draftree.drafting.base import Drafter
from draftree.engine import Engine, Request, Rules, RunStats
from draftree.engine.batch import feed, finish
from draftree.engine.limits import check_prompt
from draftree.engine.options import refuse_other_methods, split_criteria
from draftree.host import Target, open_host
from draftree.integrations.batched_processors import processors_by_request
from draftree.shaping import Shape


def custom_generate(
    drafter: Drafter | None = None,
    *,
    shape: Shape | None = None,
    seed: int | None = None,
    strict: bool = False,
    host: str = "auto",
    streamer: Any = None,
    on_stats: Callable[[RunStats], None] | None = None,
) -> Callable[..., Any]:
    """A decoding loop for Hugging Face's `generate`.

    Args:
        drafter: who guesses; None decodes plainly.
        shape, strict, host: as in `draftree.generate`.
        seed: of the noise when sampling; None takes torch's default generator (batch 1) or seeds drawn from it.
        streamer: Hugging Face drops `generate(streamer=)` on the way to custom loops, so give it here.
        on_stats: called with the run's statistics when it is done.

    Returns:
        A callable for `model.generate(input_ids, custom_generate=...)`.
    """

    def loop(
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        inputs_tensor: Tensor | None = None,
        **model_kwargs: Any,
    ) -> Any:
        refuse_other_methods(generation_config)
        opened = open_host(model, host)
        target = opened.target
        length, eos, criteria = split_criteria(stopping_criteria)
        new = (length if length is not None else generation_config.max_length) - input_ids.shape[1]
        count = input_ids.shape[0]
        prompts = _prompts(target, input_ids, model_kwargs)
        for prompt in prompts:
            check_prompt(prompt, new, target.vocab_size, target.max_positions)
        if streamer is not None and count > 1:
            raise ValueError("A streamer follows one text: call generate with a batch of 1.")
        sampling = bool(generation_config.do_sample)
        first_seed = seed
        if sampling and seed is None and count > 1:
            first_seed = int(torch.randint(0, 2**31, (1,)))
        processors = processors_by_request(logits_processor, count)
        engine = Engine(
            model,
            drafter=drafter,
            shape=shape,
            strict=strict,
            host=opened,
            slots=count,
            capacity=input_ids.shape[1] + new + 64,
        )
        requests = []
        for b, prompt in enumerate(prompts):
            rules = Rules(
                max_new_tokens=new,
                eos_token_ids=eos,
                sample=sampling,
                seed=None if first_seed is None else first_seed + b,
                processors=processors[b],
                criteria=criteria,
            )
            source = _source(inputs_tensor, b, count, model_kwargs) if target.encoder_decoder else None
            requests.append(_add(engine, prompt, input_ids[b : b + 1], b, rules, model_kwargs, streamer, source))
        pad = generation_config.pad_token_id if generation_config.pad_token_id is not None else (*eos, 0)[0]
        sequences, stats = finish(engine, requests, input_ids, pad, streamer)
        if on_stats is not None:
            on_stats(stats)
        if not generation_config.return_dict_in_generate:
            return sequences
        kind = GenerateEncoderDecoderOutput if target.encoder_decoder else GenerateDecoderOnlyOutput
        return kind(sequences=sequences)  # type: ignore[arg-type]  # Hugging Face annotates LongTensor

    return loop


def _prompts(target: Target, input_ids: Tensor, model_kwargs: dict[str, Any]) -> list[list[int]]:
    mask = model_kwargs.get("attention_mask")
    if target.encoder_decoder or mask is None:  # an encoder's mask is about its own source
        prompts: list[list[int]] = input_ids.tolist()
        return prompts
    return [row[keep].tolist() for row, keep in zip(input_ids, mask.bool(), strict=True)]


def _add(
    engine: Engine,
    prompt: list[int],
    padded: Tensor,
    b: int,
    rules: Rules,
    model_kwargs: dict[str, Any],
    streamer: Any,
    source: Tensor | None,
) -> Request:
    encoder_states = None
    if engine.target.encoder_decoder:
        mask = model_kwargs.get("attention_mask")
        states = model_kwargs["encoder_outputs"][0][b]
        encoder_states = states if mask is None else states[mask[b].bool()]
    on_token = feed(streamer, padded)
    return engine.add(
        prompt, rules, padded_prompt=padded, encoder_input=source, encoder_states=encoder_states, on_token=on_token
    )


def _source(inputs: Tensor | None, b: int, count: int, model_kwargs: dict[str, Any]) -> Tensor | None:
    """What the encoder has read for row `b` of `count`, for drafters with an encoder of their own; None if unknown."""
    if inputs is None or inputs.is_floating_point():  # embeddings in place of ids
        return None
    mask = model_kwargs.get("attention_mask")  # expanded already where a prompt has several answers
    source = inputs[b * len(inputs) // count]
    return source if mask is None else source[mask[b].bool()]
