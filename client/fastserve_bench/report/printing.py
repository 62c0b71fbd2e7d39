"""Tables on stdout."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from fastserve_client.terminal import ExitCode, cannot_write
from rich.console import Console
from rich.table import Table

# More columns than any table needs.
_WIDEST = 10_000


def print_tables(tables: Iterable[Table]) -> ExitCode:
    """Prints tables in their full width. A narrower terminal wraps lines, which loses less than
    cutting numbers and breaking labels would.

    Returns:
        The exit code for the process. If stdout takes no more, one line on stderr says so, unless
        its reader went away.
    """
    # Without a height, a terminal that calls itself dumb would have 80 columns all the same.
    console = Console(width=_WIDEST, height=1, highlight=False)
    try:
        # rich itself would end the program if the reader went away.
        with console.capture() as printed:
            for table in tables:
                console.print(table)
        sys.stdout.write(printed.get())
        sys.stdout.flush()
    except OSError as error:
        return cannot_write(error, sys.stdout, sys.stderr)
    return ExitCode.OK
