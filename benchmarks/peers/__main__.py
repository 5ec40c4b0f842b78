"""All comparisons with other engines, in turn: `make bench-peers`, or `python -m benchmarks.peers`.

Options: --quick, --all, or --model and a folder, a GGUF file or a hub name.

Each is one run of the experiment `peers`, in a folder of its own below bench-results/peers. One that is complete is not
run again, so a stopped series goes on where it was; remove its folder to begin anew.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.peers.environments import ROOT
from benchmarks.peers.peers import PEERS

PLACE = ROOT / "bench-results" / "peers"
QUICK: dict[str, list[str]] = {"peers-60m": ["--params", "60M"]}
# All engines are in memory at once: with vLLM, which takes several times its weights, they do not fit into 24 GiB here.
WITHOUT_VLLM = ",".join(name for name in PEERS.options["engines"] if name != "vllm")
LARGE = ["--params", "400M", "--set", f"engines={WITHOUT_VLLM}"]
CASES = {"peers-4m": [], **QUICK, "peers-400m": LARGE, "peers-400m-bfloat16": [*LARGE, "--dtype", "bfloat16"]}
ALL = {
    **CASES,
    "peers-400m-int8": [*LARGE, "--set", "int8=true"],
    "peers-400m-int8-bfloat16": [*LARGE, "--set", "int8=true", "--dtype", "bfloat16"],
    "peers-60m-batch-4": ["--params", "60M", "--set", "batch=4", "--per-set", "2"],
    "peers-60m-batch-8": ["--params", "60M", "--set", "batch=8", "--per-set", "3"],
}


def of_model(model: str) -> dict[str, list[str]]:
    """Return the comparison on a model of the user's: 26 prompts, answers of up to 128 tokens."""
    options = ["--model", model, "--per-set", "2", "--max-new-tokens", "128", "--set", f"engines={WITHOUT_VLLM}"]
    return {f"peers-{Path(model).name}": options}


def main(arguments: list[str]) -> None:
    """Run what is not complete yet; ends the program where a run fails or an argument is not known."""
    chosen = {"": CASES, "--quick": QUICK, "--all": ALL}.get(" ".join(arguments))
    if len(arguments) == 2 and arguments[0] == "--model":
        chosen = of_model(arguments[1])
    if chosen is None:
        sys.exit(f"There is no option {' '.join(arguments)!r}: give --quick, --all, --model NAME, or nothing.")
    for name, options in chosen.items():
        folder = PLACE / name
        result = folder / f"bench-run-{PEERS.name}.json"
        if result.is_file():
            print(f"{name} is complete: {result.relative_to(ROOT)}", flush=True)
            continue
        command = [sys.executable, "-m", "draftree", "bench", "run", PEERS.name, "--threads", "2", *options]
        print(f"{name}: {' '.join(command[1:])}", flush=True)
        done = subprocess.run([*command, "--out", str(folder)], cwd=ROOT, check=False)
        if done.returncode:
            sys.exit(done.returncode)
    print("To show them in the docs: python -m benchmarks.report NAME=FILE, a pair for each.")


if __name__ == "__main__":
    main(sys.argv[1:])
