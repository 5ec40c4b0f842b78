"""Crafted files, and files that went bad: refused in one sentence that names the file, in bounded memory and time.

The cases are those of crafted_formats.py, each loaded in a process of its own; see crafted_driver.py.
"""

import json
import time
from collections import Counter

import numpy as np
import pytest
from crafted_driver import outcomes
from crafted_formats import trie_file
from few import few

from draftree.drafting import Lookahead
from draftree.drafting.lookahead import Trie
from draftree.tree.static import choices_named

FORMATS = {"trie": 920, "folder": 600, "trace": 800, "tuned": 600, "data": 800}  # and the cases of the slow suite


def check(name: str, seed: int, cases: int) -> None:
    found = outcomes(name, seed, cases)
    counts = Counter(outcome for outcome, _ in found)
    bad = [(number, *one) for number, one in enumerate(found) if one[0] not in ("loaded", "refused")]
    assert not bad, f"{dict(counts)}; the first: {bad[:5]}"
    assert counts["refused"] > cases / 2, "most changes should matter"
    assert counts["loaded"], "some should not"


@pytest.mark.parametrize("name", few(FORMATS, ["trie"]))
def test_crafted_files_are_refused_or_work(name):
    check(name, 0, 24)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FORMATS)
def test_many_crafted_files_are_refused_or_work(name):
    check(name, 1, FORMATS[name])


def chain(length, **options):
    """A trie file that holds one branch of so many tokens, with the digest that belongs to it."""
    rows = np.arange(length, dtype=np.int32)
    header = {"tokenizer": "tokenizer", "options": options, "nodes": length, "tick": length}
    columns = [rows, rows - 1, rows * 0 + 256, rows]
    return trie_file(json.dumps(header).encode(), np.array(columns).tobytes())


@pytest.mark.parametrize("backend", ["auto", "python"])
def test_fields_of_a_trie_are_checked(tmp_path, backend):
    path = tmp_path / "t.trie"

    def refused(data, match):
        path.write_bytes(data)
        begun = time.monotonic()
        with pytest.raises(ValueError, match=match) as error:
            Trie.load(path, "tokenizer", backend=backend)
        assert str(path) in str(error.value)
        assert time.monotonic() - begun < 10

    path.write_bytes(chain(5))
    assert Trie.load(path, "tokenizer", backend=backend).nodes == 5
    refused(chain(300_000, branch_length=4096), "a branch is longer than branch_length")
    refused(chain(5, branch_length=10**8), "branch_length is 100000000: give at most 4096")
    refused(chain(5, branch_length=None), "branch_length is None: give a whole number")
    refused(chain(5, max_nodes=4), "more than max_nodes")
    refused(chain(5, prune="yes"), "prune='yes' must be True or False")
    header = json.dumps({"tokenizer": "tokenizer", "options": {}, "nodes": 2, "tick": 9}).encode()
    for columns, match in (
        ([[1, 2], [-1, 1], [256, 256], [1, 2]], "does not stand behind its parent"),
        ([[1, 2], [-1, -2], [256, 256], [1, 2]], "does not stand behind its parent"),
        ([[1, -2], [-1, 0], [256, 256], [1, 2]], "a token is negative"),
        ([[1, 2], [-1, 0], [256, 0], [1, 2]], "a count is out of range"),
        ([[1, 1], [-1, -1], [256, 256], [1, 2]], "two children of one token"),
        ([[1, 2], [-1, -1], [256, 256], [2, 1]], "order of depth and time"),
    ):
        refused(trie_file(header, np.array(columns, np.int32).tobytes()), match)
    refused(trie_file(header, bytes(16)), "number of nodes that follow")


def test_options_beyond_all_use_are_refused_before_memory_is_taken():
    for name in ("branch_length", "decoding_length", "max_query_length"):
        with pytest.raises(ValueError, match=f"{name} is 100000000: give at most 4096"):
            Lookahead(**{name: 10**8})
    for tree in ("full-99", "efficient-999999999", "full-9999999999999"):
        with pytest.raises(ValueError, match="take fewer siblings"):
            choices_named(tree, 4)
    assert len(choices_named("full-8", 4)) == 8 + 64 + 512 + 4096
