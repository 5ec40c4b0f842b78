"""The hooked runner: any stock model through its own `forward`. `one_pass` describes a pass.

`ModelLayout` holds facts that only a running model shows: the shape of its keys and values, and the modules between
its last layer and its head. Configurations name these in many ways, so one row is passed through the model and
observed. Learned drafters need them.

`check_trees` tries a model once when it is opened: a tree's logits must equal those of its branches. The trial is for
untested families and for models altered by their user. Two short requests of different lengths get a tree each. Every
branch is compared with a plain `forward` of the model, and the longest branch once more row by row. It costs some tens
of rows. A model that ignores our mask or positions, treats a single row differently or raises an error is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from draftree.errors import brief
from draftree.runner.base import Runner, lock_of
from draftree.runner.hooked.one_pass import HookedPass, StockModel
from draftree.runner.kv.cache import GradientCache, SlotCache
from draftree.runner.plan import PassResult, Plan
from draftree.runner.target import Target, rows_of
from draftree.runner.weights.stock import rounding_linear

OneRow = Callable[[SlotCache, tuple[int, ...]], PassResult]  # passes one row, and taps these layers

ROWS_STAY = ("zamba2",)
INSTEAD = "use a drafter outside the model, such as draftree.Lookahead(), and no pruner"
CLOSE = 1e-2  # relative difference, wide enough for 16-bit types


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """Facts of one model, seen in a pass."""

    kv_heads: int  # key/value heads of every layer
    head_dim: int  # width of a key
    value_dim: int  # width of a value
    # Modules that a hidden state passes between the last layer and the head, in order.
    closing: tuple[nn.Module, ...] = field(repr=False)
    scale: float  # factor on what they return before the head reads it (T5 with a tied head), else 1
    factor: float  # on the head's output (Cohere, Granite), else 1
    cap: float | None  # soft cap of the head's output (Gemma 2); None for none
    reference: weakref.ref[Any] = field(repr=False)  # weak, so that cached facts do not keep the model alive

    def close(self, hidden: Tensor) -> Tensor:
        """Return the head's input [..., d'] from the last layer's output [..., d]."""
        for module in self.closing:
            hidden = module(hidden)
        return hidden if self.scale == 1.0 else hidden * self.scale

    def finish(self, output: Tensor) -> Tensor:
        """Return the model's logits from the head's output [..., V]."""
        if self.cap is not None:
            output = self.cap * torch.tanh(output / self.cap)
        if self.factor != 1.0:
            output = output * self.factor
        bias = getattr(self.reference(), "final_logits_bias", None)  # BART and its kin
        return output if bias is None else output + bias.to(output)

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """The model's own head: [..., d'] -> [..., V]; what a model does to its logits behind it is left out."""
        model: Any = self.reference()
        head: Callable[[Tensor], Tensor] = model.get_output_embeddings()
        return head


@torch.no_grad()
def layout_of(target: Target, cache: SlotCache, one_row: OneRow) -> ModelLayout:
    """Return the facts of a model.

    Args:
        cache: an empty one, of one slot.
        one_row: passes a row through the stock model's own `forward`.
    """
    with lock_of(target.model):
        calls: list[nn.Module] = []  # behind the last layer, in order
        read: list[Tensor] = []
        outputs: list[Tensor] = []

        def note(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and args and isinstance(args[0], Tensor):
                calls.append(module)

        head = target.model.get_output_embeddings()
        inside = {id(m) for layer in target.layers for m in layer.modules()} | {id(head)}
        with ExitStack() as stack:
            for module in target.decoder.modules():
                if id(module) not in inside and not list(module.children()):
                    stack.callback(module.register_forward_hook(note).remove)
            for register, hook in (
                (target.layers[-1].register_forward_pre_hook, lambda *_: calls.clear()),
                (head.register_forward_pre_hook, lambda _, args: read.append(args[0])),
                (head.register_forward_hook, lambda *call: outputs.append(call[-1])),
            ):
                stack.callback(register(hook).remove)
            result = one_row(cache, (len(target.layers),))
    held = [(k, v) for k, v in zip(cache.keys, cache.values, strict=True) if k is not None and v is not None]
    shapes = {(keys.shape[1], keys.shape[3], values.shape[3]) for keys, values in held}
    if len(shapes) != 1:
        raise ValueError(
            f"The layers of this '{target.model_type}' model differ in the shape of their keys and values, so "
            f"neither early pruning nor a drafter inside the model can be used with it: {INSTEAD}."
        )
    kv_heads, head_dim, value_dim = shapes.pop()
    closing = tuple(module for module in calls if not isinstance(module, nn.Dropout))
    layout = ModelLayout(kv_heads, head_dim, value_dim, closing, 1.0, 1.0, None, target.reference)
    last, logits = result.hidden[len(target.layers)], result.logits
    if read:  # else the model multiplies by the head's weight itself
        layout = replace(layout, scale=_factor(layout.close(last), read[-1]))
        bias = getattr(target.model, "final_logits_bias", None)
        factor = _factor(outputs[-1], logits if bias is None else logits - bias.to(logits))
        made = [replace(layout, factor=factor)]
        cap = getattr(target.config, "final_logit_softcapping", None)
        if cap is not None:  # some models have the setting and do not apply it
            made.append(replace(layout, cap=float(cap)))
        layout = min(made, key=lambda one: _difference(one.finish(outputs[-1]), logits))
        if max(_difference(layout.close(last), read[-1]), _difference(layout.finish(outputs[-1]), logits)) <= CLOSE:
            return layout
    raise ValueError(
        f"Cannot follow a '{target.model_type}' model from its last layer to its logits, as early pruning and drafters "
        f"inside the model need: {INSTEAD}; and please report this architecture."
    )


def _factor(made: Tensor, wanted: Tensor) -> float:
    """Return the number by which `made` has to be multiplied; 1 where it is near, or where shapes differ."""
    if made.shape != wanted.shape:
        return 1.0
    ours, theirs = made.cpu().double().flatten(), wanted.cpu().double().flatten()  # Macs' GPUs have no float64
    factor = float((ours @ theirs) / (ours @ ours))
    return 1.0 if abs(factor - 1) < CLOSE else factor


def _difference(made: Tensor, wanted: Tensor) -> float:
    """Return the largest difference, relative to the largest number; infinity where shapes differ."""
    made, wanted = made.cpu(), wanted.cpu()  # which may lie on two devices
    return float((made - wanted).abs().max() / wanted.abs().max()) if made.shape == wanted.shape else torch.inf


class HookedRunner(Runner):
    """Drives any decoder-only model, and the decoder of an encoder-decoder, through `forward`."""

    name = "hooked"
    copies = False

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.lock = lock_of(target.model)
        self._stock = StockModel(target)

    def _one_row(self, cache: SlotCache, taps: tuple[int, ...]) -> PassResult:
        """Pass one row through the model, and tap these layers."""
        target, encoder = self.target, None
        # A token of the middle of the vocabulary: token 0 is often padding, whose embedding may be all zeros.
        one = torch.full((1, 1), rows_of(target.model) // 2, dtype=torch.long, device=target.device)
        if target.encoder_decoder:
            encoder = self.new_encoder(1)
            encoder.admit(0, one[0].repeat(2))
        row = torch.ones(1, 1, 1, dtype=torch.bool, device=target.device)
        return self.run(Plan(one, torch.zeros_like(one), row, taps=taps, prompt=True), cache, encoder=encoder)

    @torch.no_grad()
    def run(self, plan: Plan, cache: SlotCache, first: int = 0, encoder: Any = None) -> PassResult:
        return self._run(plan, cache, first, encoder)

    @torch.no_grad()
    def close(self, hidden: Tensor) -> Tensor:
        with self.lock:  # another thread's pass has hooks on these modules while it lasts
            return self.layout.close(hidden)

    @torch.no_grad()
    def head(self, closed: Tensor) -> Tensor:
        with self.lock:
            return self.layout.head(closed)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        return self.layout.finish(self.head(self.close(hidden)))

    @cached_property
    def layout(self) -> ModelLayout:
        """The facts of the model that one pass of a row shows; see `layout_of`."""
        return layout_of(self.target, self.new_cache(1), self._one_row)

    def run_with_gradients(
        self,
        plan: Plan,
        prefix: Sequence[tuple[Tensor, Tensor]] | None = None,
        encoder: Any = None,
        context: SlotCache | None = None,
    ) -> PassResult:
        """Pass rows through the model, differentiable in the plan's embeddings, prefix and surgeries.

        There is nothing to commit afterwards. `prefix` is the deep prefix, per layer (keys, values), each [kv heads, P,
        head dim] or [B, ..]; `encoder` as of `run`; `context` has been filled by `run`, with equally many KV positions
        in every slot, and None stands for whole sequences.
        """
        return self._run(plan, GradientCache(len(self.target.layers), plan.batch, prefix, context), 0, encoder)

    def _run(self, plan: Plan, cache: SlotCache, first: int, encoder: Any) -> PassResult:
        if self.target.model.training:
            self.target.refuse_training()
        if self.target.model_type in ROWS_STAY and plan.surgeries:
            raise ValueError(
                f"Rows cannot leave or join in mid-stack of a '{self.target.model_type}' model, whose layers also read "
                "the embeddings: leave the pruner out."
            )
        with self.lock:  # else another thread could take a pass's hooks for the user's
            cache.open(first, plan.batch, plan.width + plan.appended, bare=plan.bare)
            result = HookedPass(self._stock, plan, cache, first, encoder).run()
        result.runner = self
        return result


# The root, then six nodes: by node, the nodes from the root to itself.
BRANCHES = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5], [0, 1, 4, 6]]
PATH = BRANCHES[-1]
CONTEXT = 12  # tokens; longer where a window is short enough to reach its end cheaply
LONGEST_CONTEXT = 160
# Root mean square difference of a row allowed, in units of the logits' own spread. A wrong mask gives 0.05 to 1,
# rounding 1e-6 in fp32 and about 0.01 in 16 bits.
TOLERANCE = 1e-3
TOLERANCE_16_BIT = 0.05


def check_trees(runner: Runner) -> float:
    """Compare a tree's logits with its branches'; return the relative difference, largest in fp32, median in 16 bits.

    Raises:
        ValueError: they differ, so drafts would change the model's text; or a model that fails in such a pass.
    """
    target = runner.target
    if target.model.training:
        target.refuse_training()
    texts = [_tokens(target.vocab_size, _context(target) - 3 * b, 1 + b) for b in range(2)]
    tree, source = _tokens(target.vocab_size, len(BRANCHES), 7), _tokens(target.vocab_size, 5, 9)
    try:
        nodes, path = _tree_logits(runner, texts, tree, source)
        stock = torch.stack([_stock_logits(runner, text, tree, source) for text in texts])
        # A Mac's GPU has no float64.
        nodes, path, stock = nodes.cpu().double(), path.cpu().double(), stock.cpu().double()
        off = torch.cat([nodes - stock, path - stock[:, [node - 1 for node in PATH[1:]]]], 1)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise _failed(target, error) from error
    rows = off.pow(2).mean(-1).sqrt() / stock.std().clamp(min=1e-12)
    in_16_bits = torch.is_autocast_enabled(target.device.type) or target.dtype.itemsize < 4
    # In 16 bits a near-tie of a router sends single rows to another expert, which says nothing about masks.
    figure = float(rows.median() if in_16_bits else rows.max())
    if not figure <= (TOLERANCE_16_BIT if in_16_bits else TOLERANCE):  # NaN fails as well
        raise _differing(target, f"differ by {figure:.1%} of their spread")
    return figure


def _context(target: Target) -> int:
    """Return the number of context tokens: more than a short window holds, and no more than the model takes."""
    named = getattr(target.config, "sliding_window", None)  # a window, also where no layer is known to have it
    reach = min(filter(None, (named, *(kind.window or kind.chunk for kind in target.kinds))), default=0)
    context = reach + 4 if CONTEXT < reach + 4 <= LONGEST_CONTEXT else CONTEXT
    most = (target.max_positions or LONGEST_CONTEXT * 2) - len(BRANCHES)
    return max(4, min(context, most))


def _tokens(vocabulary: int, count: int, seed: int) -> Tensor:
    """Return LongTensor [count] out of the middle of the vocabulary, where no special tokens are."""
    generator = torch.Generator().manual_seed(seed)
    low = vocabulary // 4
    return torch.randint(low, max(vocabulary // 2, low + 1), (count,), generator=generator, device="cpu")


def _differing(target: Target, how: str) -> ValueError:
    """Return the error for a model whose tree has not the logits of its branches."""
    name = rounding_linear(target.model)
    if name is not None:
        return ValueError(
            f"This model rounds activations ({type(target.model.get_submodule(name)).__name__} {name!r}), so a token's "
            f"logits depend on the rows beside it (they {how}) and drafts would change its text: quantise the weights "
            "alone, as GGUF files, GPTQ, AWQ, quantize='q8_0' and quantize='int8' do."
        )
    return ValueError(
        f"The logits that '{target.model_type}' gives for a tree are not those of its branches (they {how}), so drafts "
        "would change its text: use Hugging Face's own generate, and please report this architecture if the model is "
        "as its class makes it."
    )


def _failed(target: Target, error: Exception) -> ValueError:
    """Return the error for a model that fails in a pass."""
    if target.alteration is not None:
        return ValueError(
            f"This model fails in a pass as draftree makes it, and {target.alteration} ({type(error).__name__}: "
            f"{brief(error)}): use Hugging Face's own generate, or the model without the change."
        )
    return ValueError(
        f"'{target.model_type}' models cannot be driven as draftree tries it ({type(error).__name__} in a pass): "
        "use Hugging Face's own generate, and please report this architecture."
    )


def _tree_logits(runner: Runner, texts: list[Tensor], tree: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits through the runner, with all requests in one pass.

    Returns:
        those of the nodes below the root, [requests, nodes, V]; and those of the nodes of `PATH` below the root, passed
        one row at a time as in plain decoding, [requests, depth, V]: a model may treat a single row differently.
    """
    device, count = runner.target.device, len(texts)
    cache, lengths = runner.new_cache(count), tuple(len(text) for text in texts)
    encoder = runner.new_encoder(count) if runner.target.encoder_decoder else None
    for b, text in enumerate(texts):
        if encoder is not None:
            encoder.admit(b, source)
        plan = Plan.causal(text[None].to(device), prompt_lengths=lengths[b : b + 1], prompt=True)
        cache.commit([list(range(len(text)))], runner.run(plan, cache, b, encoder).segments)
    visible = torch.zeros(len(BRANCHES), len(BRANCHES), dtype=torch.bool, device=device)
    for node, branch in enumerate(BRANCHES):
        visible[node, branch] = True
    depths = torch.tensor([len(branch) - 1 for branch in BRANCHES], dtype=torch.long, device=device)
    positions = torch.tensor(lengths, dtype=torch.long, device=device)[:, None] + depths
    tokens = tree.to(device).expand(count, -1)
    plan = Plan(tokens, positions, visible.expand(count, -1, -1), prompt_lengths=lengths, first_logit_row=1)
    logits = runner.run(plan, cache, 0, encoder).logits
    single, path = visible[:1, :1].expand(count, 1, 1), []
    for node in PATH:
        row = slice(node, node + 1)
        result = runner.run(Plan(tokens[:, row], positions[:, row], single, prompt_lengths=lengths), cache, 0, encoder)
        cache.commit([[0]] * count, result.segments)
        path.append(result.logits)
    return logits, torch.cat(path[1:], 1)


@torch.no_grad()
def _stock_logits(runner: Runner, text: Tensor, tree: Tensor, source: Tensor) -> Tensor:
    """Return the logits [nodes, V] of the model's own `forward` at the ends of the branches."""
    device, logits = runner.target.device, []
    for branch in BRANCHES[1:]:
        ids = torch.cat([text, tree[branch]])[None].to(device)
        arguments: dict[str, Any] = {"input_ids": ids, "use_cache": False, "return_dict": True}
        if runner.target.encoder_decoder:
            arguments |= {"input_ids": source[None].to(device), "decoder_input_ids": ids}
        logits.append(runner.target.model(**arguments).logits[0, -1])
    return torch.stack(logits)
