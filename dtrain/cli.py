"""The verbs, and the only place that exits.

Nothing heavy is imported before a verb needs it, so that `--help` and a mistake answer at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from dtrain import __version__

EXIT_CODES = (
    "Exit codes: 0 finished; 1 the run failed (the first cause is the last line); 2 a mistake in the "
    "command, the layout or the machine, nothing was started; 130 or 143 stopped by Ctrl-C or SIGTERM, a "
    "checkpoint written (a second Ctrl-C stops at once, without one)."
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train transformers with every parallelism from one layout file.",
    epilog=EXIT_CODES,
)

LayoutFile = Annotated[str, typer.Argument(metavar="LAYOUT", help="A layout file, as in layouts/.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Values in place of the file's, as in run.steps=10 optim.lr=1e-4."),
]


@contextmanager
def _one_line() -> Iterator[None]:
    """What dtrain raises for a person becomes one line and exit code 2."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "dtrain":
            raise
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dtrain {__version__}")
        raise typer.Exit


@app.callback()
def _dtrain(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


@app.command(epilog=EXIT_CODES)
def run(
    layout: LayoutFile,
    overrides: Overrides = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
) -> None:
    """Train. Starts the processes of one machine itself; inside torchrun or srun it is one of theirs."""
    from dtrain import launch

    raise typer.Exit(launch.start(layout, overrides or [], quiet))


@app.command()
def show(layout: LayoutFile, overrides: Overrides = None) -> None:
    """Print where every parameter and activation lies, the pipeline's stages and the groups of ranks."""
    with _one_line():
        from dtrain.layout import load

        loaded = load(layout, overrides or [])
        from dtrain.show import show as page

        typer.echo(page(loaded))


@app.command()
def verify(layout: LayoutFile, overrides: Overrides = None) -> None:
    """Shrink a layout, run it on simulated ranks and compare every tensor with one device."""
    with _one_line():
        from dtrain.layout import load

        loaded = load(layout, overrides or [])
        from dtrain.verify import main as check

        equal = check(loaded)
    raise typer.Exit(0 if equal else 1)


def main() -> None:
    app(prog_name="dtrain")


if __name__ == "__main__":
    main()
