"""The command line: `blockscale` or `python -m blockscale`."""

import io
import sys


def main() -> None:
    """Runs the command named in sys.argv and exits with its code: 0 only when it succeeded."""
    from blockscale.cli.app import app

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode shows "?", and gets no traceback
    app(prog_name="blockscale")
