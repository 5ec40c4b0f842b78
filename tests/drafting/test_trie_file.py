"""A saved trie gives the same drafts, and other files are refused in a sentence."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from draftree.drafting import Lookahead
from draftree.drafting.lookahead import Trie


@pytest.fixture
def saved(tmp_path):
    """A trie that was pruned and decayed, and its file."""
    trie = Trie(branch_length=5, max_nodes=400, eos_token_ids=[3])
    rng = np.random.default_rng(1)
    for request in range(30):
        trie.begin(request, rng.integers(0, 9, 12))
        for _ in range(5):
            trie.extend(request, rng.integers(0, 9, 4))
        trie.end(request)
    path = tmp_path / "outputs.trie"
    trie.save(path, "tokenizer-a")
    return trie, path


@pytest.mark.parametrize("copied", [False, True])
def test_round_trip_drafts_the_same(saved, copied):
    trie, path = saved
    again = copy.deepcopy(trie) if copied else Trie.load(path, "tokenizer-a")
    assert (again.options, again.nodes) == (trie.options, trie.nodes)
    for key in range(9):
        for mode in ("hierarchical", "parallel", "single"):
            drafts = []
            for each in (trie, again):
                each.begin(key, [1, key])
                drafts.append(each.retrieve(key, 32, mode=mode))
                each.end(key)
            for left, right in zip(*drafts, strict=True):
                np.testing.assert_array_equal(left, right)
    assert len(drafts[0].tokens) > 0


def test_the_store_without_a_compiler_reads_and_writes_the_same_file(saved, tmp_path):
    trie, path = saved
    plain = Trie.load(path, "tokenizer-a", compiled=False)
    assert (plain.nodes, plain.compiled) == (trie.nodes, False)
    plain.warm([0, 1, 2])
    plain.save(tmp_path / "plain.trie", "tokenizer-a")
    assert Trie.load(tmp_path / "plain.trie", "tokenizer-a").nodes == plain.nodes


def test_an_empty_trie_can_be_saved(tmp_path):
    Trie().save(tmp_path / "empty", "t")
    assert Trie.load(tmp_path / "empty", "t").nodes == 0


def test_options_of_numpy_can_be_saved(tmp_path):
    drafter = Lookahead(prompt_weight=np.float32(2), max_nodes=np.int64(1000), eos_token_ids=np.array([3]))
    drafter.warm([[5, 6, 7]])
    drafter.trie.save(tmp_path / "t", "t")
    assert Trie.load(tmp_path / "t", "t").options == drafter.trie.options == copy.deepcopy(drafter).trie.options


def test_saving_leaves_nothing_else_behind(saved):
    _, path = saved
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_another_tokenizer_is_refused(saved):
    with pytest.raises(ValueError, match=r"tokenizer-a.*not 'tokenizer-b'"):
        Trie.load(saved[1], "tokenizer-b")


def test_other_and_damaged_files_are_refused(saved):
    _, path = saved
    data = path.read_bytes()
    for other in (b"", b"DRAFT", data[: len(data) // 2], data[:20]):
        path.write_bytes(other)
        with pytest.raises(ValueError, match="not a trie that draftree saved"):
            Trie.load(path, "tokenizer-a")
    save_file({"tokens": np.zeros(3, np.int32)}, path)
    with pytest.raises(ValueError, match="not a trie that draftree saved"):
        Trie.load(path, "tokenizer-a")
    for missing in (path.with_name("missing.trie"), path.parent):
        with pytest.raises(ValueError, match="There is no trie file"):
            Trie.load(missing, "tokenizer-a")


def test_a_loaded_drafter_has_the_options_of_its_trie(demo: Any, tmp_path: Path) -> None:
    saved = Lookahead(max_nodes=1000, capacity=3)
    saved.warm([[5, 6, 7, 8]])
    saved.save(tmp_path / "trie", demo.tokenizer)
    loaded = Lookahead.load(tmp_path / "trie", demo.tokenizer, mode="single")
    assert (loaded.trie.options.max_nodes, loaded.trie_of("another").options.max_nodes) == (1000, 1000)
    assert (loaded.trie_of("another").options.capacity, loaded.mode) == (3, "single")
    assert loaded.trie_of("another").nodes == loaded.trie.nodes > 0
    with pytest.raises(TypeError, match="max_nodes"):
        Lookahead.load(tmp_path / "trie", demo.tokenizer, max_nodes=5)


@pytest.mark.parametrize("given", [None, "a name", 5])
def test_a_tokenizer_is_needed(given: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=f"give the model's tokenizer, not a {type(given).__name__}"):
        Lookahead().save(tmp_path / "trie", given)
    with pytest.raises(TypeError, match="give the model's tokenizer"):
        Lookahead.load(tmp_path / "trie", given)
