"""Valid files of every format that draftree reads, random changes to them, and what is done with what loads.

Digests are made anew where the format has one, so that what is tried is the check of every field and not the digest.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import struct

import numpy as np
import torch
from rich.console import Console
from test_folder import save
from zoo import build

import draftree
from draftree.cli.trace_view import show
from draftree.drafting.folder import CONFIG, WEIGHTS, base_of, method_class
from draftree.drafting.lookahead import Trie
from draftree.drafting.lookahead.c_trie import load_library
from draftree.runner.target import inspect_model
from draftree.trace.counts import run_statistics
from draftree.trace.file import read_trace, write_trace
from draftree.trace.page import write_trace_page
from draftree.training.journal import Journal
from draftree.training.rows import kept_out, read_data
from draftree.tuning.file import Spec, load_tuned, write_tuned

ODD = (
    None, True, False, -1, 0, 1, 2, 3, 4, 7, 64, 97, 10**5, 10**9, 2**31 - 1, 2**31, 2**32, 2**63, -(2**31), -(10**18),
    10**400, 0.5, -0.5, 1e-320, 1e308, float("nan"), float("inf"), "", "x", "full-99", "efficient-999999999",
    "bita", "auto", "a\nb", "\0", "../x", "x" * 5000,
    [], {}, [0], [1, 2], [[]], [[0]], [None], ["x"], {"x": 1}, [{}], [-1], [10**9],
)  # fmt: skip
RAW = (
    b"",
    b"{",
    b"[]",
    b"null",
    b"3",
    b'"x"',
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"9" * 10_000,
    b"\0" * 64,
)


class Tokenizer:
    """Of the models of tests, whose tokens have no text."""

    def get_vocab(self):
        return {str(i): i for i in range(97)}


def places(value, at=()):
    """The paths to all values inside a JSON value."""
    yield at
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield from places(inner, (*at, key))


def changed(rng, value):
    """A JSON value with one to three things in it changed."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.choice(list(places(value))[1:] or [()])
        if not at:
            return rng.choice(ODD)
        inside = value
        for key in at[:-1]:
            inside = inside[key]
        what = rng.random()
        if what < 0.2:
            del inside[at[-1]]
        elif what < 0.3 and isinstance(inside, list):
            inside.insert(rng.randrange(len(inside) + 1), copy.deepcopy(inside[at[-1]]))
        elif what < 0.35 and isinstance(inside, dict):
            inside["unknown"] = rng.choice(ODD)
        elif what < 0.5 and isinstance(inside[at[-1]], int):
            inside[at[-1]] += rng.choice((-1, 1, 1000))
        else:
            inside[at[-1]] = copy.deepcopy(rng.choice(ODD))
    return value


def changed_bytes(rng, data):
    """Bytes cut, flipped, doubled or replaced."""
    what = rng.randrange(4)
    if what == 0:
        return data[: rng.randrange(len(data))]
    if what == 1:
        found = bytearray(data)
        for _ in range(rng.choice((1, 3))):
            found[rng.randrange(len(found))] = rng.randrange(256)
        return bytes(found)
    return data + data if what == 2 else rng.choice(RAW)


def change_json(rng, path):
    """Change a file that holds one JSON value."""
    if rng.random() < 0.15:
        path.write_bytes(changed_bytes(rng, path.read_bytes()))
    else:
        path.write_text(json.dumps(changed(rng, json.loads(path.read_text()))))


def change_lines(rng, path):
    """Change a file of JSON lines."""
    if rng.random() < 0.15:
        path.write_bytes(changed_bytes(rng, path.read_bytes()))
        return
    lines = path.read_bytes().splitlines()
    at = rng.randrange(len(lines))
    what = rng.random()
    if what < 0.05:
        del lines[at]
    elif what < 0.1:
        lines.insert(rng.randrange(len(lines)), lines[at])
    elif what < 0.15:
        lines[at] = changed_bytes(rng, lines[at]).replace(b"\n", b"")
    else:
        lines[at] = json.dumps(changed(rng, json.loads(lines[at]))).encode()
    path.write_bytes(b"\n".join(lines) + b"\n")


# ---------------------------------------------------------------- tries

BACKENDS = ["c", "python"]
try:
    load_library()
except OSError:
    BACKENDS = ["python"]


def make_trie(folder):
    trie = Trie(branch_length=5, decoding_length=8, max_nodes=400, eos_token_ids=[3], backend="python")
    rng = np.random.default_rng(1)
    for _ in range(20):
        trie.warm(rng.integers(0, 9, 12))
    trie.save(folder / "t.trie", "tokenizer")


def trie_file(header, columns, version=1, header_length=None):
    """The bytes of a trie file, with the digest that belongs to them."""
    length = len(header) if header_length is None else header_length
    body = struct.pack("<8sII", b"DRAFTRIE", version, length) + header + columns
    return body + hashlib.sha256(body).digest()


def change_trie(rng, folder):
    path = folder / "t.trie"
    body = path.read_bytes()[:-32]
    _, version, length = struct.unpack_from("<8sII", body)
    header = json.loads(body[16 : 16 + length])
    n = header["nodes"]
    columns = np.frombuffer(body, "<i4", offset=16 + length).reshape(4, n).copy()
    what = rng.random()
    if what < 0.6:
        odd = (-(2**31), -2, -1, 0, 1, n - 1, n, n + 1, 2**31 - 1)
        for _ in range(rng.choice((1, 1, 3, n))):
            column, row = rng.randrange(4), rng.randrange(n)
            columns[column, row] = rng.choice((*odd, row, row - 1, row + 1, int(columns[column, rng.randrange(n)])))
    elif what < 0.9:
        header = changed(rng, header)
    rest = columns.tobytes()
    if rng.random() < 0.1:
        rest = rest[: rng.randrange(len(rest))] if rng.random() < 0.5 else rest + bytes(rng.randrange(100))
    text = json.dumps(header).encode() if rng.random() < 0.95 else rng.choice(RAW)
    length = len(text)
    if what > 0.95:
        version, length = rng.choice((0, 1, 2, 2**32 - 1)), rng.choice((0, length - 1, length + 1, 2**31, 2**32 - 1))
    path.write_bytes(trie_file(text, rest, version, length))


def use_trie(folder):
    found = []
    for backend in BACKENDS:
        try:
            trie = Trie.load(folder / "t.trie", "tokenizer", backend=backend)
        except ValueError as error:
            found.append(error)
            continue
        drafts = []
        for step, prompt in enumerate(([1, 2, 3, 4], [0] * 3, [5, 6])):
            trie.begin(step, prompt)
            for mode in ("hierarchical", "parallel", "single"):
                drafts += [column.tolist() for column in trie.retrieve(step, 40, mode=mode)]
            trie.extend(step, [1, 2, 4, 0])
        trie.save(folder / f"{backend}.trie", "tokenizer")
        Trie.load(folder / f"{backend}.trie", "tokenizer", backend=backend)
        found.append(drafts)
    if len(found) == 2 and repr(found[0]) != repr(found[1]):
        raise AssertionError(f"the twins differ: {str(found[0])[:200]} {str(found[1])[:200]}")
    if isinstance(found[0], ValueError):
        raise found[0]


# ---------------------------------------------------------------- drafter folders

METHODS = ("medusa", "bita", "hidden-transfer", "early-head")


def make_folders(folder):
    model = build("llama")
    for method in METHODS[:3]:
        save(method, model, folder / method)
    drafter = method_class("early-head").fresh(model, layer=2, rank=4)
    drafter.base = base_of(model)
    drafter.save_pretrained(folder / "early-head")


def change_folder(rng, folder):
    method = rng.choice(METHODS)
    for other in METHODS:
        if other != method:
            shutil.rmtree(folder / other)
    what = rng.random()
    if what < 0.4:
        change_json(rng, folder / method / CONFIG)
        return
    if what < 0.75:
        config = json.loads((folder / method / CONFIG).read_text())
        config["settings"] = changed(rng, config["settings"])
        (folder / method / CONFIG).write_text(json.dumps(config))
        return
    path = folder / method / WEIGHTS
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    what = rng.random()
    if what < 0.2 or not header:
        path.write_bytes(changed_bytes(rng, data))
    else:
        for entry in header.values():
            if "dtype" in entry and rng.random() < 0.2:
                entry["dtype"] = rng.choice(("F16", "I32", "F64", "BOOL", "C64", "F8_E4M3", "U8", "X"))
        text = json.dumps(changed(rng, header) if what < 0.8 else header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def use_folder(folder):
    model = build("llama")
    (only,) = folder.iterdir()
    if only.name == "early-head":
        method_class("early-head").from_pretrained(only, model)
        return
    drafter = draftree.load_drafter(only, model)
    draft(model, drafter)


# ---------------------------------------------------------------- traces


def make_trace(folder):
    model = build("llama")
    recorder = draftree.Recorder()
    drafter = draftree.Lookahead(8, 4)
    for _ in range(2):
        draftree.generate(
            model, torch.tensor([[5, 6, 7, 5, 6], [8, 9, 8, 9, 8]]), drafter=drafter, shape=draftree.Fixed(4),
            max_new_tokens=6, recorder=recorder,
        )  # fmt: skip
    write_trace(recorder, folder / "t.jsonl")


def change_trace(rng, folder):
    change_lines(rng, folder / "t.jsonl")


def use_trace(folder):
    trace = read_trace(folder / "t.jsonl")
    run_statistics(trace).summary()
    with (folder / "out.txt").open("w") as out:
        show(trace, Console(file=out, width=120), [])
    write_trace_page(trace, folder / "t.html")


# ---------------------------------------------------------------- tune files


def make_tuned(folder):
    model = build("llama")
    save("bita", model, folder / "drafter")
    trie = draftree.Lookahead(8, 4)
    trie.warm([[1, 2, 3, 4, 5]])
    parts = (
        Spec("lookahead", {"branch_length": 4, "decoding_length": 8, "prompt_weight": 2.0}, warm=True),
        Spec("prompt-lookup", {"num_draft_tokens": 4}),
        Spec("trained", name=str(folder / "drafter")),
    )
    more = {"minutes": 1.0}
    write_tuned(folder / "t.json", model, Spec("merge", parts=parts), 4, ["a", "b", "c"], more, trie, Tokenizer())


def change_tuned(rng, folder):
    change_json(rng, folder / "t.json")


def use_tuned(folder):
    model = build("llama")
    drafter = load_tuned(folder / "t.json", model, Tokenizer())
    draft(model, drafter)


# ---------------------------------------------------------------- journals and data sets


def make_data(folder):
    rows = [
        {"id": f"q{i}", "set": "s", "prompt_ids": [1, 2, 3], "answer_ids": [4, 5, 6, 7 + i], "text": "x"}
        for i in range(8)
    ]
    rows.append(rows[0] | {"id": next(f"q{i}" for i in range(99) if kept_out("s", f"q{i}"))})
    about = {"model": base_of(build("llama")), "template": "none"}
    for name in ("open", "done"):
        with Journal(folder / name, about) as journal:
            for number, row in enumerate(rows):
                journal.add(number, [row])
            if name == "done":
                journal.finish()


def change_data(rng, folder):
    name, rest = rng.choice((("open", "journal.jsonl"), ("done", "rows.jsonl")))
    shutil.rmtree(folder / ("done" if name == "open" else "open"))
    if rng.random() < 0.4:
        change_json(rng, folder / name / "meta.json")
    else:
        change_lines(rng, folder / name / rest)


def use_data(folder):
    (only,) = folder.iterdir()
    model = build("llama")
    with Journal(only, {"model": base_of(model), "template": "none"}) as journal:
        journal.finish()
    read_data(only, inspect_model(model))


def draft(model, drafter):
    """Draft with what was loaded; what does not fit may still be refused, in words of its own."""
    try:
        draftree.generate(model, torch.tensor([[5, 6, 7]]), drafter=drafter, max_new_tokens=5)
    except ValueError as error:
        if "\n" in str(error) or not str(error).endswith("."):
            raise


FORMATS = {
    "trie": (make_trie, change_trie, use_trie),
    "folder": (make_folders, change_folder, use_folder),
    "trace": (make_trace, change_trace, use_trace),
    "tuned": (make_tuned, change_tuned, use_tuned),
    "data": (make_data, change_data, use_data),
}
