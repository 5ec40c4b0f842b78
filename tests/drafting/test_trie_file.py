"""A saved trie drafts the same, whichever twin reads it, and a file that is not right is refused with a
sentence.
"""

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftree.drafting import Lookahead
from draftree.drafting.lookahead import Trie, c_trie
from draftree.drafting.lookahead.c_trie import load_library

try:
    load_library()
    BACKENDS = ["c", "python"]
except OSError:
    BACKENDS = ["python"]


@pytest.fixture
def saved(tmp_path):
    """A trie that was pruned and decayed, and its file."""
    trie = Trie(branch_length=5, max_nodes=400, eos_token_ids=[3], backend=BACKENDS[0])
    rng = np.random.default_rng(1)
    for request in range(30):
        trie.begin(request, rng.integers(0, 9, 12))
        for _ in range(5):
            trie.extend(request, rng.integers(0, 9, 4))
        trie.end(request)
    path = tmp_path / "outputs.trie"
    trie.save(path, "tokenizer-a")
    return trie, path


@pytest.mark.parametrize("backend", BACKENDS)
def test_round_trip_drafts_the_same(saved, backend):
    trie, path = saved
    again = Trie.load(path, "tokenizer-a", backend=backend)
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


@pytest.mark.skipif("c" not in BACKENDS, reason="not built: python hatch_build.py")
def test_a_trie_that_grows_while_it_is_saved_is_saved_whole(tmp_path, monkeypatch):
    """Collecting garbage may end a request of an engine that nobody holds any more, in the middle of a save."""
    trie, path = Trie(backend="c"), tmp_path / "outputs.trie"
    trie.warm([1, 2, 3, 1, 2, 4])
    room = []

    class Growing:
        """NumPy, with which the first array comes late."""

        def __getattr__(self, name):
            return getattr(np, name)

        def empty(self, count, kind):
            room.append(count)
            if len(room) == 1:
                trie.warm(range(10_000, 10_050))
            return np.empty(count, kind)

    monkeypatch.setattr(c_trie, "np", Growing())
    trie.save(path, "tokenizer-a")
    assert room[0] < room[-1]
    assert Trie.load(path, "tokenizer-a").nodes == trie.nodes


def test_an_empty_trie_can_be_saved(tmp_path):
    Trie(backend="python").save(tmp_path / "empty", "t")
    assert Trie.load(tmp_path / "empty", "t", backend="python").nodes == 0


def test_options_of_numpy_can_be_saved(tmp_path):
    drafter = Lookahead(prompt_weight=np.float32(2), max_nodes=np.int64(1000), eos_token_ids=np.array([3]))
    drafter.warm([[5, 6, 7]])
    drafter.trie.save(tmp_path / "t", "t")
    assert Trie.load(tmp_path / "t", "t").options == drafter.trie.options == copy.deepcopy(drafter).trie.options


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("clock", [0, 2**32 - 1])
def test_no_clock_in_a_file_spoils_what_is_saved_later(saved, tmp_path, backend, clock):
    _, path = saved
    data = path.read_bytes()
    size = int.from_bytes(data[12:16], "little")
    header = json.dumps(json.loads(data[16 : 16 + size]) | {"tick": clock}).encode()
    body = data[:12] + len(header).to_bytes(4, "little") + header + data[16 + size : -32]
    path.write_bytes(body + hashlib.sha256(body).digest())
    again = Trie.load(path, "tokenizer-a", backend=backend)
    again.warm(list(range(9)))
    again.save(path, "tokenizer-a")
    assert Trie.load(path, "tokenizer-a", backend=backend).nodes == again.nodes


def test_saving_leaves_nothing_else_behind(saved):
    _, path = saved
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_another_tokenizer_is_refused(saved):
    with pytest.raises(ValueError, match=r"tokenizer-a.*not 'tokenizer-b'"):
        Trie.load(saved[1], "tokenizer-b")


def test_damage_is_refused(saved):
    _, path = saved
    data = path.read_bytes()
    for cut in (len(data) // 2, len(data) - 1, 20):
        path.write_bytes(data[:cut])
        with pytest.raises(ValueError, match="damaged or cut"):
            Trie.load(path, "tokenizer-a")
    path.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    with pytest.raises(ValueError, match="damaged or cut"):
        Trie.load(path, "tokenizer-a")


def test_newer_versions_and_other_files_are_refused(saved):
    _, path = saved
    data = path.read_bytes()
    path.write_bytes(data[:8] + (99).to_bytes(4, "little") + data[12:])
    with pytest.raises(ValueError, match=r"format 99.*update"):
        Trie.load(path, "tokenizer-a")
    for other in (b"", b"DRAFT", b"PK\x03\x04" + data):
        path.write_bytes(other)
        with pytest.raises(ValueError, match="not a draftree trie"):
            Trie.load(path, "tokenizer-a")


def test_a_loaded_drafter_has_the_options_of_its_trie(demo: Any, tmp_path: Path) -> None:
    saved = Lookahead(max_nodes=1000, capacity=3)
    saved.warm([[5, 6, 7, 8]])
    saved.save(tmp_path / "trie", demo.tokenizer)
    loaded = Lookahead.load(tmp_path / "trie", demo.tokenizer, mode="single", backend="python")
    assert (loaded.trie.options.max_nodes, loaded.trie_of("another").options.max_nodes) == (1000, 1000)
    assert (loaded.trie_of("another").options.capacity, loaded.mode) == (3, "single")
    assert loaded.trie.backend == loaded.trie_of("another").backend == "python"
    with pytest.raises(TypeError, match="max_nodes"):
        Lookahead.load(tmp_path / "trie", demo.tokenizer, max_nodes=5)


@pytest.mark.parametrize("given", [None, "a name", 5])
def test_what_is_no_tokenizer(given: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=f"a {type(given).__name__} is no tokenizer: give the model's"):
        Lookahead().save(tmp_path / "trie", given)
    with pytest.raises(TypeError, match="is no tokenizer: give the model's"):
        Lookahead.load(tmp_path / "trie", given)
