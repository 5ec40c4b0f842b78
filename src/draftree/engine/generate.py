"""`generate`: a batch of prompts through the engine, with Hugging Face's options and output format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from draftree.acceptance import LossyRule
from draftree.drafting.base import Drafter
from draftree.engine.batch import Row, check_streamer, ended, real_tokens, run_batch, seeds_of
from draftree.engine.config import EngineConfig
from draftree.engine.constraints import Grammars, compile_grammars
from draftree.engine.criteria import criteria_by_request
from draftree.engine.limits import check_mask, check_prompt, check_source, check_tokens, decoder_start
from draftree.engine.options import Options, read_options, rules_for
from draftree.engine.recorder import Recorder
from draftree.engine.stats import RunStats
from draftree.grammar import CompiledGrammar
from draftree.pruning import EarlyPruning
from draftree.runner import Runner, Target, open_runner
from draftree.runner.target import rows_of
from draftree.shaping import Shape


@dataclass(frozen=True, slots=True)
class GenerateOutput:
    """What `generate` returns.

    Attributes:
        sequences: LongTensor [batch, prompt + new]; prompts as given, short rows filled with the pad token.
        stats: statistics per request, and their sum.
    """

    sequences: Tensor
    stats: RunStats


def generate(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    drafter: Drafter | None = None,
    pruner: EarlyPruning | None = None,
    shape: Shape | None = None,
    max_new_tokens: int | None = None,
    do_sample: bool | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    stopping_criteria: StoppingCriteriaList | Sequence[StoppingCriteria] | None = None,
    generation_config: GenerationConfig | None = None,
    streamer: Any = None,
    strict: bool = False,
    acceptance: LossyRule | None = None,
    runner: str | Runner = "auto",
    tokenizer: Any = None,
    recorder: Recorder | None = None,
    grammar: Grammars = None,
    **options: Any,
) -> GenerateOutput:
    """Generate several tokens per forward pass, with the text that plain decoding would give.

    Args:
        model: a Hugging Face causal LM or encoder-decoder.
        input_ids: LongTensor [batch, length]; padding is what `attention_mask` hides at either end.
        attention_mask: [batch, length] of 0 and 1; without one pad tokens are hidden where Hugging Face hides them: in
            prompts of a decoder-only model, unless they end texts too.
        drafter: drafts, such as `Lookahead()`; None decodes plainly. A `BiLD` CHANGES the text.
        pruner: drops unlikely draft tokens inside the pass (`EarlyPruning`); None for none.
        shape: sizes the trees; by default by measured cost.
        max_new_tokens: most tokens to emit (128 where neither this nor a config sets it).
        do_sample: draw tokens (default as in the model's generation config, with a warning where that draws); with it
            `temperature`, `top_k`, `top_p` as in Hugging Face.
        seed: of the noise, at most 64 bits; request b of a batch uses seed + b. With a seed, batch 1 equals Hugging
            Face's `generate(do_sample=True)` after `torch.manual_seed(seed)`. None takes torch's default generator.
        eos_token_id: ends a text; default from the model's generation config, [] for none.
        stopping_criteria: called after every token with its true prefix. A row that they end is filled with the pad
            token; Hugging Face, where a batch has no EOS, lets it go on until all rows have ended.
        generation_config: Hugging Face's; explicit arguments win over it.
        streamer: Hugging Face streamer (batch 1).
        strict: in 16 bits, bit for bit the answers of plain decoding alone; refused where that cannot be kept.
        acceptance: None keeps the text as it is; `LossyTypical` keeps plausible draft tokens and CHANGES the text.
        runner: "auto", "hooked", "eager", "cpu", "cuda_graphs", "in_place", or a runner opened for the model.
        tokenizer: the model's; needed for `stop_strings` and for a grammar.
        recorder: keeps every step for `write_trace`.
        grammar: what the answers may say, one for all or one for each; None for anything.
        options: any other option of Hugging Face's GenerationConfig. None of one of these is Hugging Face's None, while
            None of an argument above is 'not given': `eos_token_id=[]` is for no EOS, `top_k=0` for no top_k.

    Raises:
        TypeError, ValueError: what is wrong and what to do, before any work is done.
    """
    named = {
        "max_new_tokens": max_new_tokens,
        "do_sample": do_sample,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "repetition_penalty": repetition_penalty,
        "eos_token_id": eos_token_id,
    }
    with ended(streamer):
        opened = open_runner(model, runner)
        target = opened.target
        _check_ids(input_ids, attention_mask)
        input_ids = input_ids.long()
        config = EngineConfig(
            drafter=drafter,
            pruner=pruner,
            shape=shape,
            runner=opened,
            strict=strict,
            acceptance=acceptance,
            recorder=recorder,
        )
        given = {name: value for name, value in named.items() if value is not None} | options
        read = read_options(target.model, generation_config, stopping_criteria, tokenizer, given)
        if attention_mask is None and not target.encoder_decoder:
            attention_mask = read.default_mask(input_ids)
        copies = int(read.config.num_return_sequences or 1)
        if copies > 1:
            input_ids = input_ids.repeat_interleave(copies, 0)
            attention_mask = None if attention_mask is None else attention_mask.repeat_interleave(copies, 0)
        check_streamer(streamer, len(input_ids))
        check_tokens(read.config, target.vocab_size)
        fit = tokenizer, target.vocab_size, read.eos_token_ids, read.config.min_new_tokens
        grammars = compile_grammars(grammar, len(input_ids), *fit)
        seeds = seeds_of(read.config.do_sample, seed, len(input_ids))
        rows, texts = _rows(target, input_ids, attention_mask, read, seeds, grammars)
        return GenerateOutput(*run_batch(model, config, rows, texts, read.pad_token_id, streamer))


def _rows(
    target: Target,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    options: Options,
    seeds: Sequence[int | None],
    grammars: Sequence[CompiledGrammar | None],
) -> tuple[list[Row], Tensor]:
    """The requests of a batch, and what their answers are written behind, LongTensor [batch, length].

    An encoder-decoder's encoder reads `input_ids`, and its answers are written behind the decoder's first token.
    """
    prompts, texts, mask = real_tokens(input_ids, attention_mask), input_ids, attention_mask
    sources: list[Tensor | None] = [None] * len(prompts)
    if target.encoder_decoder:
        for source in prompts:
            check_source(source, rows_of(target.model), target.max_positions)
        sources = [torch.tensor(source, device=target.device, dtype=torch.long) for source in prompts]
        start, mask = decoder_start(options.config), None  # the mask is about the source
        prompts = [[start] for _ in sources]
        texts = torch.full((len(prompts), 1), start, dtype=torch.long, device=input_ids.device)
    elif mask is not None:
        mask = None if bool(mask.bool().all()) else mask.to(target.device)
    padded_length = texts.shape[1]
    new = options.new_tokens(padded_length, max(len(prompt) for prompt in prompts), target.max_positions)
    most = new if options.criterion_length is None else max(1, options.criterion_length - padded_length)
    for prompt in prompts:
        check_prompt(prompt, most, target.vocab_size, target.max_positions)
    read, padded = input_ids.to(target.device), texts.to(target.device)
    criteria = criteria_by_request(options.criteria, len(prompts))
    rows = []
    for b, prompt in enumerate(prompts):
        params = rules_for(
            target.model,
            options,
            max_new_tokens=new,
            padded_length=padded_length,
            seed=seeds[b],
            encoder_ids=read[b : b + 1],
            mask=None if mask is None else mask[b : b + 1],
            grammar=grammars[b],
            criteria=criteria[b],
        )
        rows.append(Row(prompt, params, padded[b : b + 1], sources[b]))
    return rows, texts


def _check_ids(input_ids: Any, attention_mask: Tensor | None) -> None:
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or not _integral(input_ids):
        raise ValueError(
            "input_ids must be a LongTensor [batch, length]: tokenizer(..., return_tensors='pt').input_ids."
        )
    if input_ids.shape[0] == 0 or input_ids.shape[1] == 0:
        raise ValueError("The prompt is empty: give at least one token (the tokenizer's BOS, say).")
    if attention_mask is None:
        return
    if not isinstance(attention_mask, Tensor):
        raise TypeError(
            f"attention_mask is a {type(attention_mask).__name__}: give a tensor [batch, length] of 0 and 1."
        )
    check_mask(input_ids, attention_mask)
    if not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        raise ValueError(
            "attention_mask holds other values than 0 and 1: give 1 for the tokens to read, 0 for padding."
        )


def _integral(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
