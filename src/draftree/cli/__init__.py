"""The command line: one file per verb."""

from __future__ import annotations

import atexit
import gc
import re
import sys
import warnings
from typing import Annotated, Any

import typer

from draftree.cli import bench, chat, demo, generate, serve, trace, train
from draftree.errors import brief

app = typer.Typer(name="draftree", no_args_is_help=True, pretty_exceptions_enable=False)
app.command("demo")(demo.demo)
app.command("try")(demo.try_model)
app.command("chat")(chat.chat)
app.command("generate")(generate.generate)
app.command("serve")(serve.serve)
app.command("trace")(trace.trace)
app.command("tune")(bench.tune)
app.add_typer(bench.app, name="bench")
app.add_typer(train.app, name="train")


def _print_version(asked: bool) -> None:
    if asked:
        from draftree import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def draftree(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Generate several tokens per forward pass with any Hugging Face model, without changing its output."""


def main() -> None:
    """Run the command line; print bad input as one sentence on standard error, with exit status 2."""
    # Imports create many permanent objects. Collecting garbage among them takes two seconds on two cores.
    gc.set_threshold(50_000, 10, 10)
    atexit.register(gc.freeze)
    usual, warnings.formatwarning = warnings.formatwarning, _warning
    try:
        app()
    except (ValueError, TypeError, OSError) as error:
        print(f"draftree: {_sentence(error)}", file=sys.stderr)
        raise SystemExit(2) from None
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not re.search("out of memory|can't allocate memory", str(error)):
            raise
        advice = "close other programs, or use a smaller model, shorter texts or fewer slots"
        print(f"draftree: There is not enough memory ({brief(error)}): {advice}.", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        warnings.formatwarning = usual


def _warning(message: Warning | str, *about: Any, **more: Any) -> str:
    """Return a warning without its line of source."""
    return f"{brief(message)}.\n"


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{str(error.filename)!r} cannot be used: {error.strerror}."
    message = str(error).strip().splitlines()
    return message[0] if message else type(error).__name__
