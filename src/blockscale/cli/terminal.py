"""What every command shares: progress on standard error, results on standard output, errors as one line."""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from safetensors import SafetensorError

from blockscale.progress import progress as progress

FAILED = 1  # the work was done and its result is not good enough
REFUSED = 2  # the work could not be done

PIPED_WIDTH = 120

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def printable(text: str) -> str:
    """Text from a file without what would drive a terminal: control, formatting and unencodable characters escaped."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def shown(text: str) -> Text:
    """Text for a table or a line, as it is: no markup, nothing that drives a terminal."""
    return Text(printable(text))


def say(message: str) -> None:
    """One line on standard error."""
    typer.echo(f"blockscale: {printable(' '.join(message.split()))}", err=True)


def output() -> Console:
    """Standard output; wide enough for every table when it is a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)


def print_json(document: Mapping[str, Any]) -> None:
    """One document; null stands for NaN and infinity, which JSON does not have."""
    print(json.dumps(_without_nan(document), indent=2, allow_nan=False))


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nan(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plain_table(title: str, **options: Any) -> Table:
    """A table without vertical lines, narrow enough for 80 columns."""
    return Table(title=shown(title), title_justify="left", box=box.SIMPLE, padding=0, show_edge=False, **options)


@contextmanager
def refusals(as_json: bool) -> Iterator[None]:
    """Turns what the user can act on into one line on standard error and exit code 2."""
    try:
        yield
    except (ValueError, RuntimeError, OSError, MemoryError, SafetensorError) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        if as_json:
            print_json({"error": message})
        say(message)
        raise typer.Exit(REFUSED) from error
