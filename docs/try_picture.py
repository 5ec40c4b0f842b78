"""Make the picture of `draftree try` on a model: `python docs/try_picture.py MODEL`.

The command runs on a terminal of `WIDTH` characters, and rich writes its last state as an SVG file.
"""

import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME

from draftree.cli import demo_view, main

PICTURE = Path(__file__).parent / "pictures" / "try.svg"
WIDTH = 100


def main_recorded(model: str, picture: Path, more: list[str]) -> None:
    """Run `draftree try MODEL` and write its terminal to `picture`, without fonts of other servers."""
    console = Console(record=True, force_terminal=True, color_system="truecolor", width=WIDTH, highlight=False)
    demo_view.Console = lambda **options: console  # type: ignore[misc,assignment]
    demo_view.Live = Mock()  # type: ignore[misc]  # Only finished turns belong into the picture.
    sys.argv = ["draftree", "try", model, *more]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
    options: dict[str, Any] = {"title": f"draftree try {Path(model).name}", "theme": SVG_EXPORT_THEME}
    svg = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(**options), flags=re.S)
    svg = svg.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")
    picture.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main_recorded(sys.argv[1], PICTURE, sys.argv[2:])
