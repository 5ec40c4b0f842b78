"""Try a model once when it is opened: a tree's logits must equal those of its branches.

The trial is for untested families and for models altered by their user. Two short requests of different lengths get a
tree each. Every branch is compared with a plain `forward` of the model, and the longest branch once more row by row.
It costs some tens of rows. A model that ignores our mask or positions, treats a single row differently or raises an
error is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftree.errors import brief
from draftree.runner.base import Runner
from draftree.runner.plan import Plan
from draftree.runner.target import Target

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

    Args:
        runner: of the model.

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
        raise ValueError(
            f"The logits that '{target.model_type}' gives for a tree are not those of its branches (they differ by "
            f"{figure:.1%} of their spread), so drafts would change its text: use Hugging Face's own generate, and "
            "please report this architecture if the model is as its class makes it."
        )
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
        plan = Plan.causal(text[None].to(device), prompt_lengths=lengths[b : b + 1])
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
