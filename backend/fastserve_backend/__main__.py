"""``fastserve``, and ``python -m fastserve_backend``."""

from __future__ import annotations

import sys


def main() -> None:
    """The command line; Ctrl-C ends it quietly from the beginning, while it imports its parts."""
    try:
        from fastserve_backend.system.lasting_imports import lasting_imports

        with lasting_imports():
            from fastserve_backend.cli import app

        app.main()
    except KeyboardInterrupt:
        sys.exit(130)  # 128 + SIGINT, as shells report it


if __name__ == "__main__":
    main()
