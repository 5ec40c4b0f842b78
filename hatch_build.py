"""Build hook: compiles the package's C files into one library beside them, for wheels and editable installs alike.

They are the Lookahead trie and the layers of the CPU runner (`src/draftree/native`).
They need no Python headers, so the wheel is tagged `py3-none-<platform>`. Without a compiler the build goes on: the
package is then pure Python, slower, and the same in what it gives. `python hatch_build.py` compiles in a checkout.
"""

from __future__ import annotations

import itertools
import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

PACKAGE = Path("src/draftree")
LIBRARY = PACKAGE / "native/_draftree.so"
LAYERS = ["-std=gnu99", "-O3", "-fno-math-errno", "-fno-trapping-math"]
SOURCES = {  # compiled side by side; the first take longest
    "kernels_avx512.c": LAYERS,
    "kernels_plain.c": LAYERS,
    "kernels_avx2.c": LAYERS,
    "layers.c": LAYERS,
    # No fused multiply-add: the trie in C and the one in Python agree to the last bit, on any processor.
    "trie.c": ["-std=c99", "-O2", "-ffp-contract=off"],
}


def compile_all(root: Path) -> str | None:
    """Builds the library; the reason in a few words when it could not be built."""
    if sys.platform == "win32":
        return "it has not been tried on Windows"
    found = filter(None, map(shutil.which, ("cc", "gcc", "clang")))
    command = shlex.split(os.environ.get("CC", "")) or list(itertools.islice(found, 1))
    if not command:
        return "no C compiler was found"
    folder = (root / LIBRARY).parent
    with TemporaryDirectory() as scratch:
        objects = {source: str(Path(scratch, source).with_suffix(".o")) for source in SOURCES}

        def compiled(source: str) -> str | None:
            compiling = [*command, *SOURCES[source], "-fPIC", "-c", str(folder / source), "-o", objects[source]]
            problem = _run(compiling)
            if problem and not _run([*compiling, "-DNO_AMX"]):  # without what an older assembler does not know
                return None
            return problem

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            problems = list(pool.map(compiled, SOURCES))
        linking = [*command, "-shared", *objects.values()]
        return next(filter(None, problems), None) or _linked(linking, root / LIBRARY)


def _linked(command: list[str], library: Path) -> str | None:
    # Built under another name and renamed: a running process may have the old library mapped.
    fresh = library.with_suffix(f".{os.getpid()}.so")
    problem = _run([*command, "-o", str(fresh), "-lm"])
    if problem:
        fresh.unlink(missing_ok=True)
        return problem
    fresh.replace(library)
    return None


def _run(command: list[str]) -> str | None:
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"the C compiler did not start ({error})"
    return f"the C compiler failed:\n{run.stderr}" if run.returncode else None


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
            if problem:
                # A library of an older build would be packed, under a tag that promises pure Python.
                (Path(self.root) / LIBRARY).unlink(missing_ok=True)
                self.app.display_warning(f"draftree: building without compiled libraries, {problem}")
                return
            from packaging.tags import mac_platforms, platform_tags

            # The compiler on a Mac builds for this version and later, and the tag has to say the same.
            least = os.environ.get("MACOSX_DEPLOYMENT_TARGET") if sys.platform == "darwin" else None
            version = [*map(int, least.split(".")), 0][:2] if least else []
            if platform.machine() == "arm64":  # of which none had an older one, and no installer takes a tag of one
                version = max(version, [11, 0]) if version else []
            tags = mac_platforms((version[0], version[1])) if version else platform_tags()
            # A manylinux promise is for the release machinery to make, not for any machine that can compile.
            plain = next(tag for tag in tags if not tag.startswith(("manylinux", "musllinux")))
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{plain}"
            build_data["artifacts"].append(f"/{LIBRARY.as_posix()}")


if __name__ == "__main__":
    raise SystemExit(compile_all(Path(__file__).parent))
