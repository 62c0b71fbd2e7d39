"""Entry point that Triton's python backend loads; the model itself is in ``fastserve_backend``.

The same file, copied to ``backends/fastserve/model.py``, makes a named backend.
"""

import locale
import os
import sys

# The backend's stub runs Python in the C locale, where files open as ASCII.
locale.setlocale(locale.LC_ALL, "C.UTF-8")
# It also ignores PYTHONPATH, and puts the working directory of the server first.
_ROOTS = os.environ.get("PYTHONPATH", "").split(os.pathsep)
sys.path[:] = [path for path in dict.fromkeys([*_ROOTS, *sys.path]) if path]

from fastserve_backend.system.lasting_imports import lasting_imports  # noqa: E402

with lasting_imports():
    from fastserve_backend.serving.triton_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
