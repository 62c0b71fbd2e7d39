"""``python -m fastserve_backend.models.gguf_process FILE DIRECTORY``: converts a GGUF file.

A process of its own, because that needs torch. What is wrong with the file goes to stdout in one
line, with exit code 2.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fastserve_backend.errors import FastServeError
from fastserve_backend.system.lasting_imports import lasting_imports


def main() -> int:
    path, directory = (Path(argument) for argument in sys.argv[1:])
    with lasting_imports():
        from fastserve_backend.models.gguf_conversion import convert
    try:
        convert(path, directory)
    except FastServeError as error:
        print(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
