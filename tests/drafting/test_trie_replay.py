"""Replay of real answers: the library's trie must be accepted at least as often as a straight reading of
the paper.

Text of four shippable sets (tests/data/README.md) is cut into words and signs; requests come one after the
other and each answer is committed as a greedy engine would: the accepted draft tokens and one token more.
"""

import json
import re
from pathlib import Path

import pytest
from few import few
from reference_trie import ReferenceTrie

from draftree.drafting.lookahead import Trie

BRANCH_LENGTH, QUERY, WEIGHT = 12, 4, 4.0
DATA = Path(__file__).parents[1] / "data" / "replay.jsonl"


@pytest.fixture(scope="module")
def requests():
    """Pairs of prompt and answer as token ids; id 0 is the end of a text."""
    ids = {"</s>": 0}

    def cut(text):
        return [ids.setdefault(piece, len(ids)) for piece in re.findall(r" ?\w+| ?[^\w\s]|\s", text)]

    rows = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
    return [(cut(row["prompt"] + "\n"), [*cut(row["response"]), 0]) for row in rows]


def acceptance_length(requests, begin, draft, commit, end):
    """Mean tokens a step. `draft` gives the paths of a tree as a set of tuples."""
    tokens = steps = 0
    for prompt, answer in requests:
        begin(prompt)
        at = 0
        while at < len(answer):
            paths = draft(prompt + answer[:at])
            accepted = 0
            while at + accepted < len(answer) and tuple(answer[at : at + accepted + 1]) in paths:
                accepted += 1
            run = min(accepted + 1, len(answer) - at)
            commit(answer[: at + run], run)
            at += run
            steps += 1
            tokens += run
        end(prompt)
    return tokens / steps


def ours(requests, decoding_length, **options):
    mode = options.pop("mode", "hierarchical")
    trie = Trie(
        branch_length=BRANCH_LENGTH,
        max_query_length=QUERY,
        prompt_weight=WEIGHT,
        decoding_length=decoding_length,
        eos_token_ids=[0],
        **options,
    )

    def draft(_):
        found = trie.retrieve(1, decoding_length, mode=mode)
        assert len(found.tokens) <= decoding_length
        paths = []
        for token, parent in zip(found.tokens.tolist(), found.parents.tolist(), strict=True):
            paths.append(((*paths[parent], token)) if parent >= 0 else (token,))
        return set(paths)

    return acceptance_length(
        requests,
        lambda prompt: trie.begin(1, prompt),
        draft,
        lambda output, run: trie.extend(1, output[-run:]),
        lambda _: trie.end(1),
    )


def straight(requests, decoding_length):
    trie = ReferenceTrie(BRANCH_LENGTH, BRANCH_LENGTH, 10**9, QUERY, WEIGHT, 0)

    def commit(output, run):
        for upto in range(len(output) - run + 1, len(output) + 1):
            trie.insert_output_token(output[:upto])

    return acceptance_length(
        requests,
        trie.insert_prompt,
        lambda context: trie.retrieve(context, decoding_length),
        commit,
        lambda prompt: trie.insert_prompt(prompt, -1),
    )


@pytest.mark.parametrize("decoding_length", few([8, 16, 64], [64]))
def test_accepted_as_often_as_the_straight_reading(requests, decoding_length):
    some = requests[:80]  # the straight reading is slow
    assert ours(some, decoding_length) >= straight(some, decoding_length) > 1.5


def test_merged_trees_beat_branches_beat_one_branch(requests):
    """Section 4.2: under the same number of tokens."""
    hierarchical, parallel, single = (ours(requests, 16, mode=mode) for mode in ("hierarchical", "parallel", "single"))
    assert hierarchical > parallel > single > 1


def test_a_bounded_trie_keeps_most_of_its_use(requests):
    """A tenth of the room costs little, because the hand frees what was seen once."""
    assert ours(requests, 16, max_nodes=10_000) > 0.88 * ours(requests, 16)
