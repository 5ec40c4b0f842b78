"""Test the labels of an answer and the ranks of equal predictions."""

import pytest
import torch
from zoo import MEMBERS, construct

from draftree.training.objective import RANKS, hits_of
from draftree.training.options import TrainOptions
from draftree.training.rows import Batch, Row
from draftree.training.run import prepare
from draftree.training.session import arguments
from draftree.training.trainer import DrafterTrainer

ROWS = [Row(tuple(range(5, 17)), 4), Row(tuple(range(20, 27)), 3)]


@pytest.mark.parametrize(
    ("method", "settings", "nearest"),
    [("early-head", {"layer": 2, "places": 2}, 1), ("medusa", {"heads": 2}, 2), ("bita", {"masks": 2}, 2)],
)
def test_every_token_of_an_answer_is_a_label_of_the_nearest_place(tmp_path, method, settings, nearest):
    """Include the last token, which mostly ends the answer."""
    _, objective = prepare(method, construct(MEMBERS["llama"]), settings, {})
    args = arguments(tmp_path, len(ROWS), TrainOptions(steps=1), torch.device("cpu"), learning_rate=1e-3)
    trainer = DrafterTrainer(objective, args, ROWS, ROWS, None, lambda line: None)
    batch = Batch(**trainer.data_collator([(row, None) for row in ROWS]))
    tokens, there = objective.truths(batch)[0]
    for b, row in enumerate(ROWS):
        assert tokens[b][there[b]].tolist() == list(row.tokens[row.start - 1 + nearest :])


def test_the_lower_of_two_tokens_with_equal_logits_is_the_better_one():
    """Rank as decoding does: a flat prediction is right about token 0 only."""
    logits = torch.zeros(1, 4, 30, dtype=torch.bfloat16)
    logits[0, 3, 9] = 1.0
    hits, seen = hits_of(logits, torch.tensor([[0, 1, 20, 9]]), torch.ones(1, 4, dtype=torch.bool))
    assert int(seen) == 4
    best = logits.argmax(-1)[0].tolist()
    assert best == [0, 0, 0, 9]
    assert hits[RANKS.index(1)] == 2
    assert hits[RANKS.index(2)] == 3
    assert hits[RANKS.index(20)] == 3
    assert hits[RANKS.index(50)] == 4
