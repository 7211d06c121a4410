"""`twostroke pull`: fetch a model now, to run it offline later; verify one that is there."""

from __future__ import annotations

import typer

from twostroke.cli import options


def pull(name: options.Model) -> None:
    """Fetch a model into the cache folder, verify it, and print where it is.

    A model that is there already is read whole and compared with its digest; a damaged file is fetched again."""
    from twostroke.models.resolve import resolve

    typer.echo(str(resolve(name, progress=lambda message: typer.echo(message, err=True), verify=True)))
