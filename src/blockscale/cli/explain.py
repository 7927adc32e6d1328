"""`blockscale explain M N K --gpu b200`: the configuration that a product would get, and why."""

from dataclasses import asdict
from typing import Annotated

import typer

import blockscale
from blockscale import backends, families, heuristics
from blockscale.cli.terminal import AsJson, print_json, refusals

Gpu = Annotated[str | None, typer.Option(help="A GPU, such as b200; the current one by default.", show_default=False)]


def explain(
    m: Annotated[int, typer.Argument(help="Rows of A and of the result.")],
    n: Annotated[int, typer.Argument(help="Rows of B, columns of the result.")],
    k: Annotated[int, typer.Argument(help="Columns of A and of B.")],
    gpu: Gpu = None,
    groups: Annotated[
        int | None, typer.Option(help="Groups that the rows of A belong to: a grouped product.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show which configuration a product would get on a GPU, and the reasons in order."""
    with refusals(as_json):
        target = backends.target_asked(gpu)
        choice = heuristics.choose(families.usual(m, n, k, target, groups=groups), target)
    if as_json:
        of = {"m": m, "n": n, "k": k, "gpu": target.name, "sms": target.sms, "groups": groups}
        print_json(of | {"config": asdict(choice.config), "reasons": choice.reasons})
    else:
        typer.echo(blockscale.explain(m, n, k, gpu=gpu, groups=groups))
