"""`draftree train`: data made by the model itself, and the trainers of what drafts inside it."""

from __future__ import annotations

import typer

from draftree.cli import train_align, train_data, train_methods

app = typer.Typer(name="train", help="Make training data and train drafters inside the model.", no_args_is_help=True)
for verb in (
    train_data.data,
    train_methods.bita,
    train_methods.hidden_transfer,
    train_methods.medusa,
    train_methods.early_head,
    train_align.align,
):
    app.command(verb.__name__.replace("_", "-"))(verb)
