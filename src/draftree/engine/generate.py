"""`generate`: a batch of prompts through one engine, with Hugging Face's options and output format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from draftree.acceptance import LossyRule
from draftree.by_name import as_drafter
from draftree.drafting.base import Drafter
from draftree.encoding import encode_texts, is_text
from draftree.engine.config import EngineConfig
from draftree.engine.engine import Engine
from draftree.engine.limits import (
    as_seed,
    check_mask,
    check_prompt,
    check_source,
    criteria_by_request,
    decoder_start,
)
from draftree.engine.recorder import Recorder
from draftree.engine.request import Emitted, RunStats
from draftree.engine.sampling import Options, SamplingParams, params_for, read_options
from draftree.errors import given_as
from draftree.grammar import CompiledGrammar, Grammars, compile_grammars
from draftree.pruning import EarlyPruning
from draftree.runner import Runner, Target, open_runner
from draftree.runner.images import Images, check_images, split_images, take_tensors
from draftree.runner.target import rows_of
from draftree.shaping import Shape

MOST_SLOTS = 64  # Larger batches queue, which bounds the KV cache.
MOST_POSITIONS = 1 << 15  # Initial size of the KV cache over all slots; it grows on demand.


@dataclass(frozen=True, slots=True)
class GenerateOutput:
    """The result of `generate`.

    Attributes:
        sequences: LongTensor [batch, prompt + new]: the prompts as given and the new tokens, padded behind.
        stats: statistics per request, and their sum.
        texts: the answers, without special tokens; empty if `generate` got no tokenizer.
    """

    sequences: Tensor
    stats: RunStats
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Return the answer of a batch of one.

        Raises:
            ValueError: there was no tokenizer, or there are several answers.
        """
        if len(self.texts) != 1:
            advice = f"there are {len(self.texts)}: read texts" if self.texts else "pass tokenizer= to generate"
            raise ValueError(f"text is the one answer of a run with a tokenizer: {advice}.")
        return self.texts[0]


def generate(
    model: Any,
    input_ids: Tensor | str | Sequence[str],
    attention_mask: Tensor | None = None,
    *,
    drafter: Drafter | str | None = None,
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
    """Generate with several tokens per forward pass and the same text as plain decoding.

    Args:
        model: a Hugging Face causal LM or encoder-decoder.
        input_ids: LongTensor [batch, length], padded at either end. Or a text or several, with `tokenizer`: messages of
            a user, encoded by the chat template if there is one; `texts` of the result are the answers.
        attention_mask: [batch, length] of 0 and 1. Without one, pad tokens in prompts of decoder-only models are hidden
            unless they also end texts, as in Hugging Face.
        drafter: such as `Lookahead()`; None decodes plainly. A `BiLD` CHANGES the text. A name or folder, as the
            command line takes them ("lookahead", "lookahead+FOLDER"), makes a drafter for this call alone.
        pruner: drops improbable draft tokens inside the pass (`EarlyPruning`); None for none.
        shape: sizes the trees; by default by measured cost.
        max_new_tokens: limit of new tokens; 128 if neither this nor a config sets it.
        do_sample: sample tokens, with `temperature`, `top_k` and `top_p` as in Hugging Face. The default is that of the
            model's generation config, with a warning if that samples.
        seed: of the sampling noise, at most 64 bits; request b of a batch uses seed + b. With a seed, batch 1 equals
            Hugging Face's `generate(do_sample=True)` after `torch.manual_seed(seed)`. None uses torch's default
            generator.
        eos_token_id: ends a text; default from the model's generation config, [] for none.
        stopping_criteria: called after each token with its true prefix. A row that ends early is padded; Hugging Face
            continues such rows if the batch has no EOS token.
        generation_config: Hugging Face's; explicit arguments win over it.
        streamer: Hugging Face streamer (batch 1).
        strict: in 16 bits, the exact bits of plain decoding, or an error.
        acceptance: None is lossless; `LossyTypical` accepts plausible draft tokens and CHANGES the text.
        runner: "auto", "hooked", "eager", "cpu", "cuda_graphs", "in_place", or a runner opened for the model.
        tokenizer: the model's; needed for prompts as text, `stop_strings` and grammars.
        recorder: records each step for `write_trace`.
        grammar: constraint of the answers, one for all or one per answer; None for none.
        options: image tensors as the model's processor returns them, and any other option of Hugging Face's
            GenerationConfig. For these None is a value, while for the arguments
            above None means "not given": use `eos_token_id=[]` for no EOS and `top_k=0` for no top-k.

    Raises:
        TypeError, ValueError: one sentence with the mistake and the remedy, before any work.
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
        if is_text(input_ids):
            padded = encode_texts(tokenizer, input_ids, attention_mask)
            input_ids, attention_mask = (torch.tensor(rows, dtype=torch.long, device=target.device) for rows in padded)
        input_ids = _checked_ids(input_ids, attention_mask)
        config = EngineConfig(
            drafter=as_drafter(drafter, model, tokenizer),
            pruner=pruner,
            shape=shape,
            runner=opened,
            strict=strict,
            acceptance=acceptance,
            recorder=recorder,
        )
        given = {name: value for name, value in named.items() if value is not None} | options
        tensors = take_tensors(target, given)
        read = read_options(target.model, generation_config, stopping_criteria, tokenizer, given)
        if attention_mask is None and not target.encoder_decoder:
            attention_mask = read.default_mask(input_ids)
        images = split_images(target, tensors, input_ids, attention_mask)
        copies = int(read.config.num_return_sequences or 1)
        if copies > 1:
            input_ids = input_ids.repeat_interleave(copies, 0)
            attention_mask = None if attention_mask is None else attention_mask.repeat_interleave(copies, 0)
            images = [one for one in images for _ in range(copies)]
        check_streamer(streamer, len(input_ids))
        grammars = compile_grammars(grammar, len(input_ids), tokenizer, target.vocab_size, read.eos_token_ids)
        seeds = seeds_of(read.config.do_sample, seed, len(input_ids))
        rows, texts = _rows(target, input_ids, attention_mask, read, seeds, grammars, images)
        sequences, stats = run_batch(model, config, rows, texts, read.pad_token_id, streamer)
        lengths = [one.emitted for one in stats.requests]
        new = [row[:length] for row, length in zip(sequences[:, texts.shape[1] :].tolist(), lengths, strict=True)]
        decode = getattr(tokenizer, "decode", None)  # A grammar's tokenizer may have none.
        said = [] if decode is None else [decode(ids, skip_special_tokens=True) for ids in new]
        return GenerateOutput(sequences, stats, said)


def _rows(
    target: Target,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    options: Options,
    seeds: Sequence[int | None],
    grammars: Sequence[CompiledGrammar | None],
    images: Sequence[Images | None],
) -> tuple[list[Row], Tensor]:
    """Return the requests of a batch, and the texts [batch, length] that their answers continue.

    For an encoder-decoder, `input_ids` is the input of the encoder, and answers continue the decoder's first token.
    """
    prompts, texts, mask = real_tokens(input_ids, attention_mask), input_ids, attention_mask
    sources: list[Tensor | None] = [None] * len(prompts)
    if target.encoder_decoder:
        for source in prompts:
            check_source(source, rows_of(target.model), target.max_positions)
        sources = [torch.tensor(source, device=target.device, dtype=torch.long) for source in prompts]
        start, mask = decoder_start(options.config), None  # The mask belongs to the encoder's input.
        prompts = [[start] for _ in sources]
        texts = torch.full((len(prompts), 1), start, dtype=torch.long, device=input_ids.device)
    elif mask is not None:
        mask = None if bool(mask.bool().all()) else mask.to(target.device)
    padded_length = texts.shape[1]
    new = options.new_tokens(padded_length, max(len(prompt) for prompt in prompts), target.max_positions)
    most = new if options.criterion_length is None else max(1, options.criterion_length - padded_length)
    for prompt, own in zip(prompts, images, strict=True):
        check_prompt(prompt, most, target.vocab_size, target.max_positions)
        check_images(target, prompt, own)
    read, padded = input_ids.to(target.device), texts.to(target.device)
    criteria = criteria_by_request(options.criteria, len(prompts))
    rows = []
    for b, prompt in enumerate(prompts):
        params = params_for(
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
        rows.append(Row(prompt, params, padded[b : b + 1], sources[b], images=images[b]))
    return rows, texts


def _checked_ids(input_ids: Any, attention_mask: Tensor | None) -> Tensor:
    integers = (torch.long, torch.int32, torch.int16, torch.int8, torch.uint8)
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.dtype not in integers:
        raise ValueError(
            "input_ids must be a LongTensor [batch, length], as of tokenizer(..., return_tensors='pt'), or text."
        )
    if input_ids.shape[0] == 0 or input_ids.shape[1] == 0:
        raise ValueError("The prompt is empty: give at least one token (the tokenizer's BOS, say).")
    if attention_mask is None:
        return input_ids.long()
    if not isinstance(attention_mask, Tensor):
        raise TypeError(
            f"attention_mask is a {type(attention_mask).__name__}: give a tensor [batch, length] of 0 and 1."
        )
    check_mask(input_ids, attention_mask)
    if not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        raise ValueError(
            "attention_mask holds other values than 0 and 1: give 1 for the tokens to read, 0 for padding."
        )
    return input_ids.long()


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a batch; the attributes are arguments of `Engine.add`."""

    prompt: list[int]
    params: SamplingParams
    padded_prompt: Tensor
    encoder_input: Tensor | None = None
    encoder_states: Tensor | None = None
    images: Images | None = None


def real_tokens(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """Return the prompts [batch, length] without their padding."""
    check_mask(input_ids, attention_mask)
    if not input_ids.shape[1]:
        raise ValueError("The prompt is empty: give at least one token (the tokenizer's BOS, say).")
    real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    prompts = [row[keep].tolist() for row, keep in zip(input_ids, real, strict=True)]
    if not all(prompts):
        raise ValueError(
            "A prompt of the batch is all padding: give every row at least one token, and a mask if that is the pad "
            "token."
        )
    begins = real & ~pad(real[:, :-1], (1, 0))  # Where a stretch of real tokens begins.
    if bool((begins.sum(1) > 1).any()):  # Families treat hidden tokens inside a prompt differently.
        raise ValueError(
            "Tokens in the midst of a prompt are hidden, by attention_mask or, without one, as pad tokens: leave them "
            "out of input_ids, or give a mask that shows them."
        )
    return prompts


def seeds_of(sample: bool | None, seed: Any, count: int) -> list[int | None]:
    """Return a seed for each of `count` requests; None for greedy decoding or torch's default generator."""
    seed = None if seed is None else as_seed(seed)
    if not sample or (seed is None and count == 1):
        return [None] * count
    if seed is None:
        seed = int(torch.randint(0, 2**31, (1,), device="cpu"))
    return [(seed + b) % 2**64 for b in range(count)]  # Torch maps negative seeds in the same way.


def check_streamer(streamer: Any, count: int) -> None:
    """Raise an error for a streamer that cannot follow `count` requests; None passes."""
    if streamer is None:
        return
    if not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise TypeError(f"streamer is {given_as(streamer)}: pass one of Hugging Face's, such as TextStreamer.")
    if count > 1:
        raise ValueError("A streamer follows one text: call generate with a batch of 1.")


@contextmanager
def ended(streamer: Any) -> Iterator[None]:
    """End a streamer at the end of the block, also after an error, so that its reader does not wait for ever."""
    try:
        yield
    except BaseException:
        with suppress(Exception):  # The first error is the one to raise.
            streamer.end()
        raise
    if streamer is not None:
        streamer.end()


def run_batch(
    model: Any,
    config: EngineConfig,
    rows: list[Row],
    input_ids: Tensor,
    pad_token_id: int,
    streamer: Any,
    *,
    prompt_streamed: bool = False,
) -> tuple[Tensor, RunStats]:
    """Answer `rows` on a new engine; return LongTensor [batch, prompt + new] and the statistics."""

    def put(emitted: Emitted) -> None:
        streamer.put(torch.tensor([emitted.token], dtype=torch.long, device="cpu"))

    length = max(len(row.prompt) + row.params.max_new_tokens for row in rows) + 64
    slots = min(len(rows), MOST_SLOTS)
    capacity = min(length, MOST_POSITIONS // slots)
    with Engine(model, replace(config, slots=slots, capacity=capacity)) as engine:
        requests = []
        for row in rows:
            if streamer is not None and not prompt_streamed:
                streamer.put(row.padded_prompt.cpu())
            requests.append(
                engine.add(
                    row.prompt,
                    row.params,
                    padded_prompt=row.padded_prompt,
                    encoder_input=row.encoder_input,
                    encoder_states=row.encoder_states,
                    inputs=row.images,
                    on_token=None if streamer is None else put,
                )
            )
        engine.run()
        stats = RunStats([request.stats for request in requests], engine.runner.name)
    for request in requests:
        if request.error is not None:
            raise request.error
    new = [torch.tensor(request.tokens, dtype=torch.long, device="cpu") for request in requests]
    answers = pad_sequence(new, batch_first=True, padding_value=pad_token_id)
    return torch.cat([input_ids, answers.to(input_ids.device)], 1), stats
