"""A file of the user's is replaced whole or not at all: by errors, full disks and kills in the middle of a write."""

import errno
import os
import re
import resource
import signal
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path

import pytest
import torch
from crafted_formats import Tokenizer
from safetensors import SafetensorError
from zoo import build

import draftree
from draftree.bench.machine import MADE
from draftree.bench.report import Report, Table
from draftree.drafting.folder import base_of, load_drafter, method_class
from draftree.drafting.lookahead import Trie
from draftree.files import PREFIX, parse_json, replacing, write_json, write_text
from draftree.trace.file import read_trace, write_trace
from draftree.trace.page import write_trace_page
from draftree.training.curve import write_curve
from draftree.training.journal import Journal
from draftree.training.whole_model import save_model
from draftree.tuning.file import Spec, load_tuned, write_tuned

ROOT = Path(__file__).parents[2]


def trace(folder, version):
    recorder = draftree.Recorder()
    prompt = torch.tensor([[5, 6, 7 + version]])
    draftree.generate(build("llama"), prompt, drafter=draftree.Lookahead(), max_new_tokens=5, recorder=recorder)
    write_trace(recorder, folder / "t.jsonl")


def page(folder, version):
    trace(folder.parent, version)
    write_trace_page(read_trace(folder.parent / "t.jsonl"), folder / "t.html")


def trie(folder, version):
    held = Trie()
    held.warm(list(range(version, 200)))
    held.save(folder / "t.trie", "tokenizer")


def tuned(folder, version):
    held = draftree.Lookahead()
    held.warm([list(range(version, 90))])
    spec = Spec("lookahead", {}, warm=True)
    write_tuned(folder / "t.json", build("llama"), spec, version, ["a", "b", "c"], {}, held, Tokenizer())


def drafter(folder, version):
    torch.manual_seed(version)
    model = build("llama")
    held = method_class("bita").fresh(model, masks=2, prompts=3, candidates=version)
    held.weights.mask_embeddings.detach().fill_(version)
    held.base = base_of(model)
    held.save_pretrained(folder)


def model(folder, version):
    torch.manual_seed(version)
    small = build("llama")
    save_model(small.__class__(small.config), None, folder)


def curve(folder, version):
    history = [{"step": i, "eval_loss": float(version), "eval_accuracy": [[0.5, 0.6]]} for i in range(3)]
    write_curve(history, folder, "title")


def report(folder, version):
    shown = ("model", "threads", "dtype", "device", "prompts", "sets", "commit")  # in the picture's heading
    about = dict.fromkeys((*MADE, *shown), "x")
    Report("x", "says", about, [Table("t", [{"a": version}], ("a",))], [], {"more": ["x"] * 50}).write(folder)


WRITERS = (trace, page, trie, tuned, drafter, model, curve, report)


def content(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "files").mkdir()
    return tmp_path / "files"


@contextmanager
def small_disk(size):
    """Files can grow to so many bytes: what writes more fails in the middle, with its first bytes on the disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("write", WRITERS)
def test_a_write_that_fails_half_way_leaves_the_old_files_and_nothing_else(folder, write, monkeypatch):
    write(folder, 1)
    before = content(folder)
    assert before
    write_page_apart = write is page and read_trace(folder.parent / "t.jsonl")
    with small_disk(64), pytest.raises((OSError, SafetensorError)):
        write_trace_page(write_page_apart, folder / "t.html", "2") if write_page_apart else write(folder, 2)
    assert content(folder) == before

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)  # where file systems that write late find out
        with pytest.raises(OSError, match="No space left"):
            write(folder, 2)
    assert content(folder) == before
    assert not list(folder.rglob(f"{PREFIX}*"))
    write(folder, 2)
    assert content(folder).keys() == before.keys()
    assert content(folder) != before


def killed(write, folder, at):
    """Whether a process that writes is killed at call `at` of those that reach the disk; at 0 while it writes."""
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            if at == 0:
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
            calls = 0

            def counted(real):
                def call(*args, **kwargs):
                    nonlocal calls
                    calls += 1
                    if calls == at:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return real(*args, **kwargs)

                return call

            os.fsync, os.replace = counted(os.fsync), counted(os.replace)
            write(folder, 2)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def draw_in_the_test_alone(monkeypatch):
    """Let its forks write the picture that it drew last: drawing takes most of a second, and touches no file."""
    test, drawn, figures = os.getpid(), [], pytest.importorskip("matplotlib.figure").Figure
    real = figures.savefig

    def savefig(figure, target, **options):
        if os.getpid() == test:
            picture = BytesIO()
            real(figure, picture, **options)
            drawn.append(picture.getvalue())
        target.write(drawn[-1]) if hasattr(target, "write") else target.write_bytes(drawn[-1])

    monkeypatch.setattr(figures, "savefig", savefig)


@pytest.mark.parametrize("write", WRITERS)
def test_a_kill_at_any_moment_leaves_whole_files(folder, write, tmp_path, monkeypatch):
    if write in (curve, report):
        draw_in_the_test_alone(monkeypatch)
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    write(tmp_path / "old", 1)
    write(tmp_path / "new", 2)
    old, new = content(tmp_path / "old"), content(tmp_path / "new")
    if write is page:
        write(folder, 1)  # at moment 0 the trace that it is made of would be cut
    for at in range(write is page, 40):
        for name, data in old.items():
            (folder / name).write_bytes(data)
        was_killed = killed(write, folder, at)
        found = {name: data for name, data in content(folder).items() if PREFIX not in name}
        assert found.keys() == old.keys()
        for name, data in found.items():
            if name.endswith((".html", ".png")) or write is trace:  # hold times
                assert data == old[name] or data.rstrip().endswith((b"</html>", b"}}", b"IEND\xaeB`\x82"))
            else:
                assert data in (old[name], new[name]), (at, name)
        if write is drafter:
            loads_whole(folder, mixed=found not in (old, new))
        if write is tuned:
            load_tuned(folder / "t.json", build("llama"), Tokenizer())
        if not was_killed:
            break
    assert 2 < at < 39, "there were moments, and an end"


def loads_whole(folder, mixed):
    if mixed:  # killed between two renames
        with pytest.raises(ValueError, match="does not hold the tensors that its"):
            load_drafter(folder, build("llama"))
        return
    held = load_drafter(folder, build("llama"))
    assert (held.weights.mask_embeddings == held.settings["candidates"]).all()


def test_a_data_set_is_finished_or_goes_on(folder):
    def write(folder, version):
        with Journal(folder, {"model": "m"}) as journal:
            for number in () if journal.complete else range(5):
                journal.add(number, [{"id": str(number), "answer_ids": [1, 2], "answer": "x" * 50}])
            journal.finish()

    with small_disk(300), pytest.raises(OSError, match="File too large"):  # in the middle of a line
        write(folder, 1)
    assert 0 < (folder / "journal.jsonl").read_bytes().count(b"\n") < 5
    write(folder, 2)
    assert (folder / "rows.jsonl").read_text().count("\n") == 5
    for file in folder.iterdir():
        file.unlink()
    assert killed(write, folder, 0), "while the first file is written"
    for at in range(1, 40):
        was_killed = killed(write, folder, at)
        write(folder, 2)
        assert (folder / "rows.jsonl").read_text().count("\n") == 5
        for file in folder.iterdir():
            if file.is_file():
                file.unlink()
        if not was_killed:
            break
    assert 3 < at < 39


def test_devices_links_and_modes_stay_what_they_are(tmp_path):
    write_text(os.devnull, "x")
    assert not Path(os.devnull).is_file()
    real, link = tmp_path / "real", tmp_path / "link"
    write_text(real, "one")
    real.chmod(0o640)
    link.symlink_to(real)
    write_text(link, "two")
    assert link.is_symlink()
    assert real.read_text() == "two"
    assert real.stat().st_mode & 0o777 == 0o640
    umask = os.umask(0o027)
    try:
        write_text(tmp_path / "new", "x")
    finally:
        os.umask(umask)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640
    with suppress(KeyboardInterrupt), replacing(real) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert real.read_text() == "two"
    with pytest.raises(FileNotFoundError, match=r"There is no folder .*nowhere for x: make it"):
        write_text(tmp_path / "nowhere" / "x", "x")
    write_json(real, {"a": "é"})
    assert parse_json(real.read_bytes()) == {"a": "é"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "new", "real"]


def test_json_is_refused_as_a_value_error_whatever_is_wrong():
    for data in (b"", b"{", b"\xff", b"[" * 10**6, b"NaN", b"[1e999]", b"-Infinity", b"9" * 10**4):
        with pytest.raises(ValueError, match=r"."):
            parse_json(data)


def test_nothing_writes_past_the_helper():
    """Every line of the package and the benchmarks that writes a file writes a temporary one, or is known here."""
    known = {
        'Path("/proc/self/clear_refs").write_text("5")  # This resets the kernel\'s peak mark.',
        'lock = opened.enter_context((self.folder / LOCK).open("wb"))',  # empty
        'with path.open("w", encoding="utf-8") as out:',  # of the journal's finished file, in a temporary folder
        "figure.savefig(out, dpi=120)",  # into memory
        # Answers as they come, so that none is lost where a run is stopped.
        'target: Any = nullcontext(sys.stdout) if out is None else out.open("w", encoding="utf-8")',
    }
    writes = re.compile(r"""\.write_(text|bytes)\(|\bopen\([^)]*["'][wx]b?["']|\.savefig\(|os\.replace|copyfile""")
    past = []
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        if path.name != "files.py" or path.parent.name != "draftree":
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
            found = [line for line in lines if writes.search(line) and "temporary" not in line and line not in known]
            past += [f"{path.relative_to(ROOT)}: {line}" for line in found]
    assert not past


@pytest.mark.parametrize("kind", ["pipe", "device", "sparse"])
def test_only_files_of_a_plausible_size_are_read(kind, tmp_path, demo):
    """A pipe would be waited for, /dev/zero read until memory ends, and so would 20 GB of zeros."""
    folder = tmp_path / "drafter"
    folder.mkdir()
    paths = {name: folder / name for name in ("a.trie", "a.jsonl", "a.json", "draftree_config.json")}
    for path in paths.values():
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        else:
            with path.open("wb") as file:
                file.truncate(20 << 30)
    (folder / "drafter.safetensors").touch()
    reads = {
        "a.trie": lambda path: draftree.Lookahead.load(path, demo.tokenizer),
        "a.jsonl": read_trace,
        "a.json": lambda path: load_tuned(path, demo.model),
        "draftree_config.json": lambda path: load_drafter(path.parent, demo.model),
    }
    for name, path in paths.items():
        with pytest.raises(ValueError, match=re.escape(name)):
            reads[name](path)
