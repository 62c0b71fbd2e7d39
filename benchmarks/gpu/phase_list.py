"""The phases of the check: what each needs, and how long it may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

_KERNELS = ("torch", "triton", "numpy")
# With what they import themselves: not every machine has all that pip would have brought.
_PYDANTIC = ("pydantic", "pydantic_core", "annotated_types", "typing_inspection")
_JINJA = ("jinja2", "markupsafe")
_MODEL = (
    *_KERNELS, *_PYDANTIC, *_JINJA, "msgspec", "yaml", "platformdirs", "psutil", "safetensors"
)  # fmt: skip
"""Of an engine's configuration, and a rank's model."""
_ENGINE = (*_MODEL, "zmq", "tokenizers")
_DISTRIBUTIONS = {
    "yaml": ("pyyaml",),
    "zmq": ("pyzmq",),
    # pydantic takes one version of it alone, which pip finds if it is told of both.
    "pydantic_core": ("pydantic", "pydantic-core"),
    "annotated_types": ("annotated-types",),
    "typing_inspection": ("typing-inspection",),
}
"""What to tell pip where it is not a module's name."""


@dataclass(frozen=True)
class Phase:
    name: str
    limit_s: float
    """It may take so long, or what those before it have left of the time for all."""
    modules: Sequence[str]
    """What it imports beside the project and the standard library."""
    is_check: bool = False
    """Right or wrong, not fast or slow."""

    @property
    def module(self) -> str:
        """Its code is ``run`` of this."""
        return f"benchmarks.gpu.phase_{self.name}"

    def missing_packages(self) -> list[str]:
        """What to install for it."""
        missing = [module for module in self.modules if find_spec(module) is None]
        names = (name for module in missing for name in _DISTRIBUTIONS.get(module, (module,)))
        return list(dict.fromkeys(names))


PHASES = (
    Phase("machine", 60, _KERNELS),
    Phase("correctness", 100, _KERNELS, is_check=True),
    Phase("parity", 150, (*_ENGINE, "transformers"), is_check=True),
    Phase("step", 110, _ENGINE),
    Phase("swap", 50, _MODEL),
    Phase("kernels", 110, _KERNELS),
    Phase("serving", 290, _ENGINE),
    # Last, as it is compiled anew for each shape.
    Phase("flex", 80, _KERNELS),
)
RESERVE_S = 5.0
"""Of the time for all, for what is done beside the phases."""
GRACE_S = 8.0
"""Between the end of a phase's time as it knows it and the end of its process."""
