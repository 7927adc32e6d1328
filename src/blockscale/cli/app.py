"""The commands, put together."""

from typing import Annotated

import typer

from blockscale import __version__
from blockscale.cli.bench import bench
from blockscale.cli.checkpoints import convert, inspect, quantize
from blockscale.cli.compile import compile_shapes
from blockscale.cli.demo import demo
from blockscale.cli.doctor import doctor
from blockscale.cli.explain import explain
from blockscale.cli.gemm import gemm

app = typer.Typer(
    help="NVFP4 matrix multiplication.", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
app.command()(demo)
app.command()(gemm)
app.command()(inspect)
app.command()(convert)
app.command()(quantize)
app.command()(explain)
app.command("compile")(compile_shapes)
app.command()(bench)
app.command()(doctor)


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """NVFP4 matrix multiplication."""
