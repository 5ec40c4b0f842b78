"""Build hook: compiles the package's C files beside their sources, for wheels and editable installs alike.

They are the twin of the Lookahead trie, the decoder layer of the CPU runner and
that of what is asked about a tree every step.
They need no Python headers, so the wheel is tagged `py3-none-<platform>`. Without a compiler the build goes on: the
package is then pure Python, slower, and the same in what it gives. `python hatch_build.py` compiles in a checkout.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGE = Path("src/draftree")
COMMON = ["-fPIC", "-shared"]
LIBRARIES = {
    # No fused multiply-add: the trie's twins agree to the last bit, on any processor.
    "drafting/lookahead/_trie": ["-std=c99", "-O2", "-ffp-contract=off"],
    "tree/_tree": ["-std=c99", "-O2"],
    "runner/cpu/_layer": ["-std=gnu99", "-O3", "-fno-math-errno", "-fno-trapping-math"],
}


def compile_all(root: Path) -> str | None:
    """Builds every library, `<name>.so` from `<name>.c`; the reason in a few words when one could not be built."""
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which(c) for c in ("cc", "gcc", "clang")]
    command = [part for part in compiler if part]
    if not command:
        return "no C compiler was found"
    if "CC" not in os.environ:
        command = command[:1]
    problems = [_compile([*command, *flags, *COMMON], root / PACKAGE / name) for name, flags in LIBRARIES.items()]
    return next((problem for problem in problems if problem), None)


def _compile(command: list[str], name: Path) -> str | None:
    # Built aside and renamed: a running process may have the old library mapped.
    fresh = name.with_suffix(f".{os.getpid()}.so")
    try:
        run = subprocess.run(
            [*command, "-o", str(fresh), str(name.with_suffix(".c")), "-lm"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        return f"the C compiler did not start ({error})"
    if run.returncode:
        fresh.unlink(missing_ok=True)
        return f"the C compiler failed:\n{run.stderr}"
    fresh.replace(name.with_suffix(".so"))
    return None


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand in a checkout, where hatchling need not be installed
    BuildHookInterface = None

if BuildHookInterface is not None:

    class LibraryBuildHook(BuildHookInterface):  # type: ignore[misc]
        """Called by hatchling for each build target."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            if self.target_name != "wheel":
                return
            problem = compile_all(Path(self.root))
            built = [PACKAGE / f"{name}.so" for name in LIBRARIES]
            if problem:
                # Libraries of an older build would be packed, under a tag that promises pure Python.
                for library in built:
                    (Path(self.root) / library).unlink(missing_ok=True)
                self.app.display_warning(f"draftree: building without compiled libraries, {problem}")
                return
            from packaging.tags import mac_platforms, platform_tags

            # The compiler on a Mac builds for this version and later, and the tag has to say the same.
            least = os.environ.get("MACOSX_DEPLOYMENT_TARGET") if sys.platform == "darwin" else None
            version = [int(part) for part in least.split(".")] if least else []
            tags = mac_platforms((version[0], version[1] if version[1:] else 0)) if version else platform_tags()
            # A manylinux promise is for the release machinery to make, not for any machine that can compile.
            plain = next(tag for tag in tags if not tag.startswith(("manylinux", "musllinux")))
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{plain}"
            build_data["artifacts"].extend(f"/{library.as_posix()}" for library in built)


if __name__ == "__main__":
    raise SystemExit(compile_all(Path(__file__).parent))
