"""The folder of a data set: `meta.json`, a journal of answered questions while it is made, then `rows.jsonl`.

The journal gets one line for each answered question. A stopped run goes on behind the lines that are there.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, Self

from draftree.files import write_json

META, JOURNAL, ROWS = "meta.json", "journal.jsonl", "rows.jsonl"


def fingerprint(value: Any) -> str:
    """Return the SHA-256 of a JSON-able value."""
    return hashlib.sha256(json.dumps(value, ensure_ascii=True).encode()).hexdigest()


class Journal:
    """A data set in the making; a context manager.

    Args:
        folder: folder of the data set; made if it is missing.
        about: facts that all rows share; JSON-able values or dataclasses.
        replace: start anew if the folder holds data of something else.

    Attributes:
        done: numbers of the answered questions.

    Raises:
        ValueError: the folder holds something else.
    """

    def __init__(self, folder: Path, about: dict[str, Any], *, replace: bool = False) -> None:
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{str(folder)!r} is a file: name a folder for the data.")
        self.folder, self._replace = folder, replace
        self.about = {key: asdict(v) if is_dataclass(v) and not isinstance(v, type) else v for key, v in about.items()}
        self.done: set[int] = set()

    def __enter__(self) -> Self:
        self._read_meta()
        journal = self.folder / JOURNAL
        if not self.complete:
            if journal.exists():
                self._recover(journal)
            self._file = journal.open("ab")
        return self

    def __exit__(self, *exception: object) -> None:
        if not self.complete:
            self._file.close()

    def _read_meta(self) -> None:
        """Read the folder's meta.json and compare it, or write it.

        Raises:
            ValueError: the folder holds something else.
        """
        meta = self.folder / META
        if meta.exists():
            self.meta = read_meta(self.folder)
            key = next((key for key, value in self.about.items() if self.meta.get(key) != value), None)
            if key is None:
                return
            if not self._replace:
                raise ValueError(
                    f"{str(self.folder)!r} holds data with other {key.replace('_', ' ')}: name another folder, or "
                    "remove that one."
                )
            (self.folder / JOURNAL).unlink(missing_ok=True)  # Finished rows stay until new ones replace them.
        elif self.folder.is_dir() and (left := next(self.folder.iterdir(), None)) is not None:
            raise ValueError(f"{str(self.folder)!r} holds {left.name!r} and no data: name an empty folder.")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.meta = self.about | {"complete": False}
        write_json(meta, self.meta)

    @property
    def complete(self) -> bool:
        """Return whether the data set is finished."""
        return bool(self.meta["complete"])

    def _recover(self, journal: Path) -> None:
        """Read the lines that are there and cut off an unfinished last one."""
        good = 0
        with journal.open("rb") as lines:
            for line in lines:
                if line.endswith(b"\n"):
                    self.done.add(json.loads(line)["number"])
                    good += len(line)
        os.truncate(journal, good)

    def add(self, number: int, rows: list[dict[str, Any]]) -> None:
        """Write the rows of question `number`, unless it has been answered already."""
        if number in self.done:
            return
        line = json.dumps({"number": number, "rows": rows}, ensure_ascii=False) + "\n"
        self._file.write(line.encode())
        self._file.flush()
        self.done.add(number)

    def finish(self, skipped: int = 0) -> dict[str, Any]:
        """Write the rows in the order of the questions and remove the journal; return the contents of meta.json.

        `skipped` counts the questions that were left out.
        """
        if self.complete:
            return self.meta
        self._file.close()
        with (self.folder / JOURNAL).open("rb") as lines:
            entries = sorted(map(json.loads, lines), key=lambda entry: entry["number"])
        rows = [row for entry in entries for row in entry["rows"]]
        with (self.folder / ROWS).open("w", encoding="utf-8") as out:
            out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
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
    """Return the contents of a data set's meta.json.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        if not isinstance(meta["complete"], bool):
            raise TypeError
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{folder / META} is damaged: make the data set again, in another folder.") from None
    return dict(meta)
