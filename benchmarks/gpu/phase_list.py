"""The phases of the check: what each needs, and how long it may take."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

_KERNELS = ("torch", "triton", "numpy")
# With their own imports, because a machine may lack what pip would have brought.
_PYDANTIC = ("pydantic", "pydantic_core", "annotated_types", "typing_inspection")
_JINJA = ("jinja2", "markupsafe")
_MODEL = (
    *_KERNELS, *_PYDANTIC, *_JINJA, "msgspec", "yaml", "platformdirs", "psutil", "safetensors"
)  # fmt: skip
"""Packages that an engine's configuration and a rank's model need."""
_ENGINE = (*_MODEL, "zmq", "tokenizers")
_DISTRIBUTIONS = {
    "yaml": ("pyyaml",),
    "zmq": ("pyzmq",),
    "flashinfer": ("flashinfer-python",),
    # pydantic needs one exact version of it, which pip finds if both are named.
    "pydantic_core": ("pydantic", "pydantic-core"),
    "annotated_types": ("annotated-types",),
    "typing_inspection": ("typing-inspection",),
}
"""Name for pip, where it differs from the module's."""
CORES = 16
"""Of the machines that the limits were chosen on."""


@dataclass(frozen=True)
class Phase:
    name: str
    limit_s: float
    """Most seconds of the phase on a machine of 16 cores; fewer if the phases before it have left
    less of the total time."""
    modules: Sequence[str]
    """What the phase imports beside the project and the standard library."""
    is_check: bool = False
    """The phase tests correctness, not speed. Then it takes longer with fewer cores, as most of its
    time goes to compiling."""

    def limit_here_s(self, is_dry_run: bool) -> float:
        """Most seconds on this machine. A dry run, too, takes longer with fewer cores."""
        if not (self.is_check or is_dry_run):
            return self.limit_s
        return self.limit_s * max(1.0, CORES / len(os.sched_getaffinity(0)))

    @property
    def module(self) -> str:
        """The module whose ``run`` is the phase."""
        return f"benchmarks.gpu.phase_{self.name}"

    def missing_packages(self) -> list[str]:
        """Packages that are missing for the phase."""
        missing = [module for module in self.modules if find_spec(module) is None]
        names = (name for module in missing for name in _DISTRIBUTIONS.get(module, (module,)))
        return list(dict.fromkeys(names))


# By value, so that a short time goes to what says most. docs/gpu.md has the measured seconds.
PHASES = (
    Phase("machine", 60, _KERNELS),
    Phase("correctness", 170, (*_KERNELS, "msgspec"), is_check=True),
    Phase("parity", 150, (*_ENGINE, "transformers"), is_check=True),
    Phase("step", 110, _ENGINE),
    Phase("kernels", 110, _KERNELS),
    Phase("serving", 190, _ENGINE),
    Phase("swap", 50, _MODEL),
    Phase("strategies", 90, _ENGINE),
    Phase("limit_128", 90, _ENGINE),
    Phase("flashinfer", 60, (*_KERNELS, "flashinfer")),
    # Last, because it compiles anew for each shape.
    Phase("flex", 80, _KERNELS),
)
RESERVE_S = 5.0
"""Part of the total time that is kept for work beside the phases."""
GRACE_S = 8.0
"""Time between the deadline that a phase knows and the kill of its process."""
