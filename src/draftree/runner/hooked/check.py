"""Try a model once when it is opened: a tree's logits must equal those of its branches.

The trial is for untested families and for models altered by their user. Two short requests of different lengths get a
tree each. Every branch is compared with a plain `forward` of the model, and the longest branch once more row by row.
It costs some tens of rows. A model that ignores our mask or positions, treats a single row differently or raises an
error is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftree.errors import brief
from draftree.runner.base import Runner
from draftree.runner.plan import Plan

PARENTS = (-1, 0, 0, 1, 1, 2, 4)
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
    named = getattr(target.config, "sliding_window", None)  # a window, also where no layer is known to have it
    reach = min(filter(None, (named, *(kind.window or kind.chunk for kind in target.kinds))), default=0)
    context = reach + 4 if CONTEXT < reach + 4 <= LONGEST_CONTEXT else CONTEXT
    room = (target.max_positions or LONGEST_CONTEXT * 2) - len(PARENTS)
    context = max(4, min(context, room))
    texts = [_tokens(target.vocab_size, context - 3 * b, 1 + b) for b in range(2)]
    branches = _branches(PARENTS)
    path = max(branches, key=len)
    nodes = range(1, len(branches))
    tree = _tokens(target.vocab_size, len(branches), 7)
    source = _tokens(target.vocab_size, 5, 9)
    try:
        ours, alone = _tree_logits(runner, texts, tree, branches, source)
        stock = torch.stack(
            [torch.stack([_stock(runner, t, tree[branches[node]], source) for node in nodes]) for t in texts]
        )
        # A Mac's GPU has no float64.
        ours, alone, stock = ours.cpu().double(), alone.cpu().double(), stock.cpu().double()
        off = torch.cat([ours - stock, alone - stock[:, [nodes.index(node) for node in path[1:]]]], 1)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if type(error).__module__.startswith("torch._dynamo"):
            raise ValueError(
                "torch.compile cannot follow a pass through this model, whose forward is compiled with fullgraph=True: "
                "compile it without fullgraph, or pass the model that is not compiled."
            ) from error
        if target.alteration is not None:
            raise ValueError(
                f"This model fails in a pass as draftree makes it, and {target.alteration} ({type(error).__name__}: "
                f"{brief(error)}): use Hugging Face's own generate, or the model without the change."
            ) from error
        raise ValueError(
            f"'{target.model_type}' models cannot be driven as draftree tries it ({type(error).__name__} in a pass): "
            "use Hugging Face's own generate, and please report this architecture."
        ) from error
    rows = off.pow(2).mean(-1).sqrt() / stock.std().clamp(min=1e-12)
    in_16_bits = torch.is_autocast_enabled(target.device.type) or target.dtype.itemsize < 4
    if not in_16_bits:
        figure, allowed = float(rows.max()), TOLERANCE
    else:  # a near-tie of a router sends single rows to another expert, which says nothing about masks
        figure, allowed = float(rows.median()), TOLERANCE_16_BIT
    if not figure <= allowed:  # NaN fails as well
        raise ValueError(
            f"The logits that '{target.model_type}' gives for a tree are not those of its branches (they differ by "
            f"{figure:.1%} of their spread), so drafts would change its text: use Hugging Face's own generate, and "
            "please report this architecture if the model is as its class makes it."
        )
    return figure


def _tokens(vocabulary: int, count: int, seed: int) -> Tensor:
    """LongTensor [count] out of the middle of the vocabulary, where no special tokens are."""
    generator = torch.Generator().manual_seed(seed)
    low = vocabulary // 4
    return torch.randint(low, max(vocabulary // 2, low + 1), (count,), generator=generator, device="cpu")


def _branches(parents: Sequence[int]) -> list[list[int]]:
    branches: list[list[int]] = []
    for node, parent in enumerate(parents):
        branches.append([*(branches[parent] if parent >= 0 else []), node])
    return branches


def _tree_logits(
    runner: Runner, texts: list[Tensor], tree: Tensor, branches: list[list[int]], source: Tensor
) -> tuple[Tensor, Tensor]:
    """Logits through the runner, all requests in one pass.

    Returns:
        those of the tree's nodes but the root, [requests, nodes - 1, V]; and those of the longest branch one row at a
        time, as plain decoding passes them, [requests, depth, V]: a model may do otherwise with a single row.
    """
    device, cache, encoder = runner.target.device, runner.new_cache(len(texts)), None
    if runner.target.encoder_decoder:
        encoder = runner.new_encoder(len(texts))
    lengths = tuple(len(t) for t in texts)
    for b, text in enumerate(texts):
        if encoder is not None:
            encoder.admit(b, source)
        plan = Plan.causal(text[None].to(device), prompt_lengths=lengths[b : b + 1])
        cache.commit([list(range(len(text)))], runner.run(plan, cache, b, encoder).segments)
    seen = torch.zeros(len(branches), len(branches), dtype=torch.bool, device="cpu")
    for node, branch in enumerate(branches):
        seen[node, branch] = True
    depths = torch.tensor([len(branch) - 1 for branch in branches], dtype=torch.long, device="cpu")
    positions = torch.tensor(lengths, dtype=torch.long, device="cpu")[:, None] + depths
    count = len(texts)
    plan = Plan(
        tree.expand(count, -1).to(device),
        positions.to(device),
        seen.expand(count, -1, -1).to(device),
        prompt_lengths=lengths,
        first_logit_row=1,  # as passes over prompts leave rows out
    )
    logits = runner.run(plan, cache, 0, encoder).logits
    single = torch.ones(count, 1, 1, dtype=torch.bool, device=device)
    alone, longest = [], max(branches, key=len)
    for depth, node in enumerate(longest):
        row = tree[node].expand(count, 1).to(device)
        plan = Plan(row, positions[:, :1].to(device) + depth, single, prompt_lengths=lengths)
        result = runner.run(plan, cache, 0, encoder)
        cache.commit([[0]] * count, result.segments)
        alone.append(result.logits)
    return logits, torch.cat(alone[1:], 1)


@torch.no_grad()
def _stock(runner: Runner, text: Tensor, branch: Tensor, source: Tensor) -> Tensor:
    """Logits [V] of the model's own `forward` at the end of one branch."""
    device = runner.target.device
    ids = torch.cat([text, branch])[None].to(device)
    arguments: dict[str, Any] = {"input_ids": ids, "use_cache": False, "return_dict": True}
    if runner.target.encoder_decoder:
        arguments |= {"input_ids": source[None].to(device), "decoder_input_ids": ids}
    logits: Tensor = runner.target.model(**arguments).logits
    return logits[0, -1]
