"""A training pass with many split points gives the logits of decoding steps, and the gradients of one pass."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from training_driver import randomise, rows_for
from zoo import MEMBERS, build

from draftree.drafting.base import Place, RequestState, Step, StepPlan
from draftree.drafting.folder import method_class
from draftree.engine.passes import tree_pass
from draftree.runner import open_runner
from draftree.runner.eager.runner import EagerRunner
from draftree.runner.kv.encoder import EncoderState
from draftree.training.objectives import DrafterObjective, cross_entropy
from draftree.training.rows import Batch, Row, collate
from draftree.training.run import prepare
from draftree.tree import TokenTree

FAMILIES = ["llama", "gemma2", "gpt2", "bloom", "mpt", "mistral", "phi3-longrope", "t5", "bart"]
CASES = {
    "bita": ("bita", {"prompts": 5}, {}),
    "bita-shallow": ("bita", {"prompts": 5, "prompting": "shallow"}, {}),
    "bita-bare": ("bita", {"prompts": 0, "masks": 2}, {}),
    "hidden-transfer": ("hidden-transfer", {"transfer_layers": [1, 2, 3]}, {"on_pseudo": True}),
    "hidden-transfer-together": ("hidden-transfer", {"transfer_layers": [2, 2, 3]}, {"on_pseudo": True}),
    "hidden-transfer-masked": ("hidden-transfer", {"transfer_layers": [1, 3], "masked": True}, {"on_pseudo": True}),
    "medusa": ("medusa", {"heads": 3}, {}),
}


def packed(objective: DrafterObjective, rows: list[Row]) -> tuple[Batch, torch.Tensor]:
    """Return the batch and the logits [B, S, D, V] of its training pass."""
    batch = Batch(**collate([(row, None) for row in rows], None))
    with torch.no_grad():
        _, logits = objective.eval().measure(batch)
    return batch, torch.stack(logits, 2)


def decoded(drafter, runner, row: Row, split: int) -> torch.Tensor:
    """Return logits [2, D, V] at token `split` and at the next one, from one decoding step over a tree of both."""
    target = runner.target
    cache = runner.new_cache(1, 64, drafter.deep_prefix(target))
    encoder = None
    if target.encoder_decoder:
        encoder = EncoderState(target, 1)
        encoder.admit(0, torch.tensor(row.source))
    place = Place(runner, cache, encoder, 0)
    context = RequestState(0, list(row.tokens[: split + 1]), row.start, 16, place=place)
    prompt = list(row.tokens[:split])
    if split > 2:  # A part of the prompt is in the cache.
        early = tree_pass([prompt[:1]], TokenTree.roots(torch.tensor([prompt[1]])), [0], None, [row.start])
        cache.commit(early.committed([[0]]), runner.run(early.plan, cache, 0, encoder).segments)
    tree = TokenTree.from_paths(row.tokens[split], [[row.tokens[split + 1]]])
    start = cache.lengths[0]
    turn = tree_pass(
        [prompt[start:]],
        tree,
        [start],
        drafter.plan(StepPlan([context], [9], [True], tree)),
        [row.start],
        target.max_positions,
    )
    result = runner.run(turn.plan, cache, 0, encoder)
    step = Step([context], tree, result, turn.prefill_rows, turn.offset)
    return torch.cat([drafter.draft_logits(step, [path]) for path in ([0], [0, 1])])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", [f for f in FAMILIES if f in MEMBERS])
def test_training_pass_equals_decoding_steps(family, case):
    model = build(family)
    method, settings, training = CASES[case]
    if settings.get("prompting") == "shallow" and model.config.is_encoder_decoder:
        with pytest.raises(ValueError, match="deep prompts"):
            prepare(method, model, settings, training)
        return
    drafter, objective = prepare(method, model, settings, training)
    randomise(drafter.weights)
    runner = open_runner(model, "hooked")
    rows = rows_for(model)
    batch, depth_logits = packed(objective, rows)
    drafter.bind(runner.target)
    runners = [runner] + ([open_runner(model, "cpu")] if EagerRunner.qualifies(runner.target) else [])
    for each in runners:
        for b, row in enumerate(rows):
            splits = batch.splits[b][batch.real[b]].tolist()
            assert splits == list(range(row.start - 1, len(row) - 2))
            for s in (0, len(splits) - 2):
                ours = decoded(drafter, each, row, splits[s])
                torch.testing.assert_close(depth_logits[b, s : s + 2], ours, atol=2e-4, rtol=2e-4)


def test_wrong_packing_changes_logits():
    """A mask that sees one token more gives other logits."""
    model = build("llama")
    drafter, objective = prepare("bita", model, {"prompts": 5}, {})
    randomise(drafter.weights)
    rows = rows_for(model, 1)
    _, depth_logits = packed(objective, rows)
    later = Batch(**collate([(rows[0], None)], None))
    plan = objective.packed(later)
    visible = plan.visible.clone()
    visible[:, :, : rows[0].start + 1] = True  # the first group sees the answer's first token
    with torch.no_grad():
        wrong = objective.runner.run_with_gradients(
            replace(plan, visible=visible), objective.prefix(1), context=objective.context(later)
        ).logits.unflatten(1, (-1, 3))
    assert (wrong[0, 0] - depth_logits[0, 0]).abs().max() > 0.01


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "gemma2"])
def test_hidden_transfer_alone_replaces_one_state_of_the_stock_model(family):
    """With `on_pseudo=False`, W_i h_j replaces the real state j + i and sees the real states before it."""
    model = build(family)
    layers = [1, 2, 3]
    drafter, objective = prepare("hidden-transfer", model, {"transfer_layers": layers}, {})
    randomise(drafter.weights)
    row = rows_for(model, 1)[0]
    batch = Batch(**collate([(row, None)], None))
    with torch.no_grad():
        depth_logits = torch.stack(objective.train().measure(batch)[1], 2)
    tokens = torch.tensor([row.tokens])
    for s, split in enumerate(batch.splits[0].tolist()):
        for i, layer in enumerate(layers, 1):
            if split + i + 1 >= len(row):
                continue

            matrix = drafter.weights.matrices()[i - 1]

            def swap(module, args, kwargs, place=split + i, origin=split, matrix=matrix):
                hidden = (args[0] if args else kwargs["hidden_states"]).clone()
                hidden[:, place] = hidden[:, origin] @ matrix.T
                return ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": hidden})

            handle = objective.target.layers[layer].register_forward_pre_hook(swap, with_kwargs=True)
            try:
                with torch.no_grad():
                    stock = model(input_ids=tokens, use_cache=False).logits[0, split + i]
            finally:
                handle.remove()
            torch.testing.assert_close(depth_logits[0, s, i - 1], stock, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("rank", [0, 3])
def test_early_head_reads_the_states_after_its_layer(rank):
    model = build("qwen3")
    head, objective = prepare("early-head", model, {"layer": 2, "rank": rank, "places": 2}, {})
    randomise(head.weights)
    row = rows_for(model, 1)[0]
    batch, depth_logits = packed(objective, [row])
    with torch.no_grad():
        states = model(input_ids=torch.tensor([row.tokens]), output_hidden_states=True, use_cache=False).hidden_states
        state = states[2][0, batch.splits[0]]
        for depth, weights in enumerate([head.weights, *head.weights.further]):
            x = state / (state.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights.norm
            moved = x + x @ (weights.up @ weights.down).T if rank else x @ weights.projection.T
            torch.testing.assert_close(depth_logits[0, :, depth], model.lm_head(moved), atol=1e-4, rtol=1e-4)
        assert depth_logits.shape[2] == 2
        assert not torch.allclose(depth_logits[0, :, 0], depth_logits[0, :, 1]), "each place has weights of its own"


def test_transfer_matrices_start_at_the_identity():
    drafter = method_class("hidden-transfer").fresh(build("llama"), transfer_layers=[1, 2])
    assert all(torch.equal(w, torch.eye(64)) for w in drafter.weights.matrices())


@pytest.mark.parametrize("method", ["bita", "hidden-transfer", "medusa", "early-head"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mpt", "t5"])
def test_gradients_reach_every_weight_and_no_weight_of_the_model(family, method):
    model = build(family)
    settings = {"layer": 2, "places": 2} if method == "early-head" else {}
    trained, objective = prepare(method, model, settings, {})
    for p in model.parameters():
        p.requires_grad_(False)
    try:
        out = objective.train()(**collate([(row, None) for row in rows_for(model)], None))
        out["loss"].backward()
    finally:
        for p in model.parameters():
            p.requires_grad_(True)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trained.weights.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_gradients_equal_differences_of_the_loss():
    """Compare with central differences through surgeries, prefix and embeddings."""
    for method, settings in (("bita", {"prompts": 2}), ("hidden-transfer", {"transfer_layers": [1, 2]})):
        model = build("qwen3")
        trained, objective = prepare(method, model, settings, {})
        randomise(trained.weights)
        inputs = collate([(row, None) for row in rows_for(model)], None)
        objective.eval()
        objective(**inputs)["loss"].backward()
        for p in trained.weights.parameters():
            direction = torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
            losses = []
            for step in (1e-2, -1e-2):
                with torch.no_grad():
                    p.add_(direction, alpha=step)
                    losses.append(float(objective(**inputs)["loss"]))
                    p.sub_(direction, alpha=step)
            slope = float((p.grad * direction).sum())
            assert (losses[0] - losses[1]) / 2e-2 == pytest.approx(slope, rel=0.05, abs=5e-3)
    model.zero_grad(set_to_none=True)


def whole_pass_loss(objective, batch):
    """Return the loss of real rows and masks in one plan, with gradients through all rows."""
    masks, real = objective.packed(batch), objective.plan(batch)
    count, width = batch.tokens.shape
    attached = masks.tokens.shape[1]
    plan = replace(
        real,
        tokens=torch.cat([batch.tokens, masks.tokens], 1),
        positions=torch.cat([real.positions, masks.positions], 1),
        visible=torch.cat([F.pad(real.visible, (0, attached)), masks.visible], 1),
        embeddings=masks.embeddings,
        prefix_rows=(torch.arange(width + attached) >= width).expand(count, -1),
        surgeries=masks.surgeries,
        first_logit_row=width,
    )
    encoder = objective.encoder(batch)
    logits = objective.runner.run_with_gradients(plan, objective.prefix(count), encoder).logits
    truths = [batch.truth(place) for place in objective.places]
    truth, there = (torch.stack(parts, -1) for parts in zip(*truths, strict=True))
    return cross_entropy(logits.unflatten(1, (-1, objective.masks)), truth, there)


SETTINGS = [{"prompts": 5}, {"prompts": 5, "prompting": "shallow"}, {"prompts": 0}]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_gradients_are_those_of_one_pass(family, settings):
    if family == "t5" and settings.get("prompting") == "shallow":
        pytest.skip("refused, see test_passes.py")
    model = copy.deepcopy(build(family)).requires_grad_(False)
    _, objective = prepare("bita", model, settings, {"prefix_dropout": 0.0})
    randomise(objective.weights)
    batch = Batch(**collate([(row, None) for row in rows_for(objective.target.model)], None))
    found = []
    for loss in (lambda: objective.measure(batch)[0], lambda: whole_pass_loss(objective, batch)):
        objective.zero_grad()
        loss().backward()
        found.append([p.grad.clone() for p in objective.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) > 0
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)
