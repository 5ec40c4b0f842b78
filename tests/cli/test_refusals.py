"""What a command refuses for its options alone it refuses before torch is loaded, which takes seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

COMMANDS = (
    ("demo", "--drafter", "lookahaed"),
    ("generate", "--drafter", "lookahaed", "hello"),
    ("generate", "--temperature", "2", "hello"),
    ("generate", "--trie", "trie", "--drafter", "medusa", "hello"),
    ("generate", "--regex", "a", "--choice", "b", "hello"),
    ("generate",),
    ("chat", "--drafter", "lookahaed"),
    ("serve", "--drafter", "lookahaed"),
    ("trace", "hello", "--drafter", "lookahaed"),
    ("train", "data", "no-such.jsonl", "--out", "answers"),
)
REFUSES = """
import sys
from draftree.cli import main

for line in sys.stdin.read().splitlines():
    sys.argv = ["draftree", *line.split("\\t")]
    try:
        main()
    except SystemExit as end:
        print(line.replace("\\t", " "), end.code, sorted({"torch", "transformers"} & set(sys.modules)))
"""


def test_options_that_do_not_fit_are_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    lines = "\n".join("\t".join(command) for command in COMMANDS)
    done = subprocess.run(
        [sys.executable, "-c", REFUSES], input=lines, capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout.splitlines() == [f"{' '.join(command)} 2 []" for command in COMMANDS], done.stderr
