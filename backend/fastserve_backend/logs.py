"""What all processes of a server log alike: they write to one stream."""

from __future__ import annotations

import logging
import sys


def log_to_stderr() -> None:
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
