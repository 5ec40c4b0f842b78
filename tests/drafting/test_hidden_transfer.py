"""Hidden Transfer: a pseudo row's logits are those of a slow pass through the stock layers, one sequence at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from few import crossed
from generate_driver import NEW, left_pad, prompts
from in_model_driver import agree, randomised, recorded
from torch import Tensor
from zoo import build

from draftree.drafting import HiddenTransfer
from draftree.drafting.hidden_transfer import default_transfer_layers
from draftree.engine import generate
from draftree.shaping import Fixed


@torch.no_grad()
def slow(model: Any, drafter: HiddenTransfer, tokens: list[int]) -> Tensor:
    """Logits [k, V] of the pseudo states of the last of `tokens`: llama's layers called one by one."""
    n = len(tokens)
    hidden = model.get_input_embeddings()(torch.tensor([tokens]))
    for layer, module in enumerate(model.model.layers):
        for i, t in enumerate(drafter.transfer_layers):
            if t == layer:  # the output of layer t, counted from 1, comes into layer index t
                hidden = torch.cat([hidden, drafter.weights.transfer[i](hidden[:, n - 1 : n])], 1)
        rows = hidden.shape[1]
        visible = torch.ones(rows, rows).tril().bool()  # pseudo rows stand behind, in the order of their steps
        if drafter.masked:
            visible[n:, n:] = torch.eye(rows - n).bool()
        mask = torch.zeros(1, 1, rows, rows).masked_fill(~visible, torch.finfo(torch.float32).min)
        angles = model.model.rotary_emb(hidden, torch.arange(rows)[None])
        hidden = module(hidden, attention_mask=mask, position_embeddings=angles)
    return model.lm_head(model.model.norm(hidden))[0, n:]


@pytest.mark.parametrize(
    ("name", "runner", "options"),
    crossed(
        ["llama", "qwen3"],
        ["cpu", "hooked"],
        [{}, {"transfer_layers": [1, 1, 2]}, {"masked": True, "transfer_layers": [2, 2]}, {"groups": 1}],
    ),
)
def test_pseudo_rows_equal_a_slow_pass(name: str, runner: str, options: dict[str, Any]) -> None:
    model = build(name)
    drafter = randomised(HiddenTransfer.fresh(model, **options))
    seen = recorded(drafter)
    ids, mask = left_pad(prompts())
    generate(model, ids, mask, drafter=drafter, shape=Fixed(12), max_new_tokens=NEW, runner=runner)
    assert any(s.accepted for s in seen)
    for s in seen[::4]:
        passed = s.accepted if options.get("groups") else 0
        agree(s, slow(model, drafter, s.tokens[: len(s.tokens) - 1 - passed])[passed:], f"{name}, {runner}")


def test_a_fresh_transfer_is_the_identity() -> None:
    drafter = HiddenTransfer.fresh(build("llama"))
    assert all(torch.equal(w, torch.eye(64)) for w in drafter.weights.matrices())
    assert set(drafter.weights.state_dict()) == {f"transfer.{i}.weight" for i in range(3)}


def test_default_layers() -> None:
    assert default_transfer_layers(32) == (15, 20, 25)
    assert default_transfer_layers(40) == (25, 30, 35)
    assert default_transfer_layers(8) == (4, 5, 6)
    assert default_transfer_layers(4) == (2, 2, 3)
    assert default_transfer_layers(2) == (1, 1, 1)


def test_what_a_tree_costs() -> None:
    model = build("llama")  # 4 layers
    assert HiddenTransfer.fresh(model, transfer_layers=[2, 3]).rows(10, 1) == 10 * (1 + 2 / 4 + 1 / 4)
    assert HiddenTransfer.fresh(model, transfer_layers=[2, 3], depth=1).rows(10, 1) == 15
    assert HiddenTransfer.fresh(model, transfer_layers=[2, 3], groups=2).rows(10, 2) == 10 + 4 * 0.75


@pytest.mark.parametrize("layers", [[], [0], [4], [3, 2], [-1]], ids=str)
def test_layers_outside_the_model(layers: list[int]) -> None:
    with pytest.raises(ValueError, match="transfer_layers"):
        HiddenTransfer.fresh(build("llama"), transfer_layers=layers)


@pytest.mark.parametrize(
    ("layers", "message"),
    [(4, "transfer_layers is a int: pass a list"), ([1.7, 2], r"transfer_layers is 1\.7: give a whole number")],
)
def test_layers_that_are_no_list_of_whole_numbers(layers: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        HiddenTransfer.fresh(build("llama"), transfer_layers=layers)
