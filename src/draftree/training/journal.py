"""The folder of a data set while it is made: a journal of whole answers, then the finished file.

The journal is only ever appended to, one line for each answered question. What a kill leaves is whole lines and at
most one torn one at the end, which is cut off when the run goes on. A whole line that is no answer was not written
here, and is refused. The finished file is written to a temporary folder and renamed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from contextlib import ExitStack
from dataclasses import asdict, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from draftree.errors import brief, install
from draftree.files import PREFIX, is_whole, parse_json, replacing_files, write_json

FORMATS = ("jsonl", "arrow")
META, JOURNAL, LOCK = "meta.json", "journal.jsonl", ".lock"
ROWS = {"jsonl": "rows.jsonl", "arrow": "rows"}
OTHER = {"system": "another system message", "questions": "other questions"}  # about what a folder holds


def fingerprint(value: Any) -> str:
    """SHA-256 of a JSON-able value."""
    return hashlib.sha256(json.dumps(value, ensure_ascii=True).encode()).hexdigest()


class Journal:
    """A data set in the making; a context manager that holds the folder for this process alone.

    Args:
        folder: where the data set goes; made where it is missing.
        about: what all rows share; JSON-able or dataclasses.
        file_format: "jsonl" or "arrow" (a `datasets` folder).
        replace: begin anew where the folder holds data of something else.

    Attributes:
        done: numbers of the questions answered so far.

    Raises:
        ValueError: an unknown format, a folder in use, or one that holds something else.
    """

    def __init__(
        self, folder: Path, about: dict[str, Any], file_format: str = "jsonl", *, replace: bool = False
    ) -> None:
        if file_format not in FORMATS:
            raise ValueError(f"The format is {file_format!r}: choose {' or '.join(FORMATS)}.")
        if file_format == "arrow" and find_spec("datasets") is None:
            raise ValueError(f"Arrow files need datasets: {install('train')}, or choose jsonl.")
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{str(folder)!r} is a file: name a folder for the data.")
        self.folder, self.file_format, self._replace = folder, file_format, replace
        self.about = {key: asdict(v) if is_dataclass(v) and not isinstance(v, type) else v for key, v in about.items()}
        self.about["format"] = file_format
        self.done: set[int] = set()

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        fresh = not (self.folder / LOCK).exists()
        with ExitStack() as opened:
            lock = opened.enter_context((self.folder / LOCK).open("wb"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ValueError(
                    f"Another run is writing {str(self.folder)!r}: wait for it, or name another."
                ) from None
            try:
                self._read_meta()
            except ValueError:
                if fresh:
                    (self.folder / LOCK).unlink(missing_ok=True)
                raise
            journal = self.folder / JOURNAL
            if self.complete:
                journal.unlink(missing_ok=True)
            else:
                if journal.exists():
                    self._recover(journal)
                self._file = opened.enter_context(journal.open("ab"))
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened.close()

    def _read_meta(self) -> None:
        """Take over what the folder says of itself, or begin it.

        Raises:
            ValueError: it holds something else.
        """
        meta = self.folder / META
        if meta.exists():
            self.meta = read_meta(self.folder)
            key = next((key for key, value in self.about.items() if self.meta.get(key) != value), None)
            if key is None:
                return
            if not self._replace:
                other = OTHER.get(key, f"another {key.replace('_', ' ')}")
                raise ValueError(
                    f"{str(self.folder)!r} holds data of {other}: name another folder, or remove that one."
                )
            (self.folder / JOURNAL).unlink(missing_ok=True)  # finished rows stay until there are others
        else:
            left = [p.name for p in self.folder.iterdir() if p.name != LOCK and not p.name.startswith(PREFIX)]
            if left:
                raise ValueError(f"{str(self.folder)!r} holds {left[0]!r} and no data: name an empty folder.")
        self.meta = self.about | {"complete": False}
        write_json(meta, self.meta)

    @property
    def complete(self) -> bool:
        """Whether the data set was finished before."""
        return bool(self.meta["complete"])

    def _recover(self, journal: Path) -> None:
        """Read the whole lines; cut off a torn one."""
        good = 0
        with journal.open("rb") as lines:
            for i, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    self.done.add(_entry(line)["number"])
                except ValueError as error:
                    raise ValueError(
                        f"{journal}, line {i}, is no answer of this data set ({brief(error)}): take that line out, or "
                        "name another folder."
                    ) from None
                good += len(line)
        os.truncate(journal, good)

    def add(self, number: int, rows: list[dict[str, Any]]) -> None:
        """Keep the rows of question `number`; a question that is there already is not taken again."""
        if number in self.done:
            return
        line = json.dumps({"number": number, "rows": rows}, ensure_ascii=False) + "\n"
        self._file.write(line.encode())
        self._file.flush()  # what is flushed outlives a kill of this process
        self.done.add(number)

    def entries(self) -> dict[int, list[dict[str, Any]]]:
        """What is in the journal of an unfinished data set: by number of the question, its rows."""
        with (self.folder / JOURNAL).open("rb") as lines:
            found = [_entry(line) for line in lines]
        return {entry["number"]: entry["rows"] for entry in found}

    def finish(self, skipped: int = 0) -> dict[str, Any]:
        """Write the data set in the order of the questions and drop the journal; returns the meta data.

        `skipped` is how many questions were left out, for the record.
        """
        if self.complete:
            return self.meta
        os.fsync(self._file.fileno())
        rows = [row for _, answered in sorted(self.entries().items()) for row in answered]
        with replacing_files(self.folder) as temporary:
            path = temporary / ROWS[self.file_format]
            if self.file_format == "jsonl":
                with path.open("w", encoding="utf-8") as out:
                    out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            else:
                _write_arrow(rows, path)
        self.meta |= {
            "complete": True,
            "rows": len(rows),
            "answer_tokens": sum(len(row.get("answer_ids", ())) for row in rows),
            "skipped": skipped,
        }
        write_json(self.folder / META, self.meta)
        (self.folder / JOURNAL).unlink()
        return self.meta


def read_meta(folder: Path) -> dict[str, Any]:
    """What a data set says of itself.

    Raises:
        ValueError: the file is broken.
    """
    try:
        found = parse_json((folder / META).read_bytes())
        whole = isinstance(found["complete"], bool) and found["format"] in ROWS
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise ValueError(f"{folder / META} is broken: make the data set anew, in another folder.")
    return dict(found)


def _entry(line: bytes) -> dict[str, Any]:
    """A line of the journal; ValueError where it is none."""
    entry = parse_json(line)
    if not isinstance(entry, dict) or not is_whole(entry.get("number")) or not isinstance(entry.get("rows"), list):
        raise ValueError("it has no number and rows")
    if not all(isinstance(row, dict) and isinstance(row.get("answer_ids", []), list) for row in entry["rows"]):
        raise ValueError("a row is none")
    return entry


def _write_arrow(rows: list[dict[str, Any]], folder: Path) -> None:
    import datasets

    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()  # the setting is global to datasets, so it is put back
    try:
        datasets.Dataset.from_list(rows).save_to_disk(str(folder))
    finally:
        if shown:
            datasets.enable_progress_bars()
