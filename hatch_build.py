"""Build hook: compiles the C twin of the Lookahead trie beside its source, for wheels and editable installs
alike.

The C file needs no Python headers, so the wheel is tagged `py3-none-<platform>`. Without a compiler the build
goes on: the package is then pure Python and says at first use what it lacks. `python hatch_build.py` compiles
in a checkout.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

FOLDER = Path("src/draftree/drafting/lookahead")
# No fused multiply-add: the twins agree to the last bit, on any processor.
FLAGS = ["-std=c99", "-O2", "-fPIC", "-shared", "-ffp-contract=off"]


def compile_trie(root: Path) -> str | None:
    """Builds `_trie.so`; the reason in a few words when it could not."""
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which(c) for c in ("cc", "gcc", "clang")]
    command = [part for part in compiler if part]
    if not command:
        return "no C compiler was found"
    if "CC" not in os.environ:
        command = command[:1]
    source, target = root / FOLDER / "_trie.c", root / FOLDER / "_trie.so"
    # Built aside and renamed: a running process may have the old library mapped.
    fresh = target.with_suffix(f".{os.getpid()}.so")
    try:
        run = subprocess.run(
            [*command, *FLAGS, "-o", str(fresh), str(source), "-lm"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        return f"the C compiler did not start ({error})"
    if run.returncode:
        fresh.unlink(missing_ok=True)
        return f"the C compiler failed:\n{run.stderr}"
    fresh.replace(target)
    return None


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand in a checkout, where hatchling need not be installed
    BuildHookInterface = None

if BuildHookInterface is not None:

    class TrieBuildHook(BuildHookInterface):  # type: ignore[misc]
        """Called by hatchling for each build target."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            if self.target_name != "wheel":
                return
            problem = compile_trie(Path(self.root))
            if problem:
                # A library of an older build would be packed, under a tag that promises pure Python.
                (Path(self.root) / FOLDER / "_trie.so").unlink(missing_ok=True)
                self.app.display_warning(f"draftree: building without the compiled trie, {problem}")
                return
            from packaging.tags import platform_tags

            # A manylinux promise is for the release machinery to make, not for any machine that can compile.
            plain = next(tag for tag in platform_tags() if not tag.startswith(("manylinux", "musllinux")))
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{plain}"
            build_data["artifacts"].append(f"/{FOLDER.as_posix()}/_trie.so")


if __name__ == "__main__":
    raise SystemExit(compile_trie(Path(__file__).parent))
