"""``python -m fastserve_backend.models.gguf_process FILE DIRECTORY``: converts a GGUF file.

It is a process of its own, because the conversion needs torch. If the file is at fault, it prints
one line to stdout and exits with code 2.
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
