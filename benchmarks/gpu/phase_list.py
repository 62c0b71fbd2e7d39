"""The phases of the check: what each needs, and how long it may take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

_KERNELS = ("torch", "triton", "numpy")
_RANK = (
    *_KERNELS, "msgspec", "pydantic", "yaml", "platformdirs", "jinja2", "psutil", "safetensors"
)  # fmt: skip
_ENGINE = (*_RANK, "zmq", "tokenizers")
_DISTRIBUTIONS = {"yaml": "pyyaml", "zmq": "pyzmq"}
"""Where a module's name is not that of its package."""


@dataclass(frozen=True)
class Phase:
    name: str
    """Its code is ``run`` of the module phase_NAME."""
    limit_s: float
    """It may take so long, or what those before it have left of the time for all."""
    modules: Sequence[str]
    """What it imports beside the project and the standard library."""
    is_check: bool = False
    """Right or wrong, not fast or slow."""

    def missing_packages(self) -> list[str]:
        """What to install for it."""
        return [
            _DISTRIBUTIONS.get(module, module)
            for module in self.modules
            if find_spec(module) is None
        ]


PHASES = (
    Phase("machine", 30, _KERNELS),
    Phase("correctness", 100, _KERNELS, is_check=True),
    Phase("parity", 75, (*_ENGINE, "transformers"), is_check=True),
    Phase("kernels", 110, _KERNELS),
    Phase("swap", 40, _RANK),
    Phase("step", 75, _ENGINE),
    Phase("serving", math.inf, _ENGINE),
)
RESERVE_S = 5.0
"""Of the time for all, for what is done beside the phases."""
GRACE_S = 8.0
"""Between the end of a phase's time as it knows it and the end of its process."""
