"""The command line: one file a verb, no logic of its own."""

from __future__ import annotations

import sys

import typer

from draftree.cli import bench, demo, generate, trace, train, tune

app = typer.Typer(
    name="draftree",
    help="Several tokens per forward pass from any Hugging Face model, without changing what it says.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.demo)
app.command("generate")(generate.generate)
app.command("trace")(trace.trace)
app.command("tune")(tune.tune)
app.add_typer(bench.app, name="bench")
app.add_typer(train.app, name="train")


def main() -> None:
    """Run the command line; bad input is one sentence on standard error and exit status 2."""
    try:
        app()
    except (ValueError, TypeError, OSError) as error:
        message = str(error).strip().splitlines()
        print(f"draftree: {message[0] if message else type(error).__name__}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
