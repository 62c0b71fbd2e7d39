"""A model's own defaults of sampling, which its authors recommend in generation_config.json.

As in vLLM, a field that is there counts whatever ``do_sample`` says, and a field that is not there
has the server's default.
"""

from __future__ import annotations

import logging
from pathlib import Path

from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.load_config import GENERATION_FILE, read_json
from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.errors import InvalidRequestError
from fastserve_backend.sampling_params import MODEL_DEFAULTS, SamplingParams

_log = logging.getLogger(__name__)


def load_generation_defaults(config: ModelConfig) -> dict[str, float]:
    """Those of ``MODEL_DEFAULTS`` that the model's generation_config.json has. They are logged.

    A field that is null counts as left out.

    Raises:
        ModelError: a value that no request may have. The message names file, field and value.
    """
    path = Path(config.directory or "", GENERATION_FILE)
    if config.directory is None or not path.is_file():
        return {}
    fields = read_json(path, config.name)
    defaults = {name: fields[name] for name in MODEL_DEFAULTS if fields.get(name) is not None}
    for name, value in defaults.items():
        try:
            SamplingParams(**{name: value})
        except InvalidRequestError as error:
            raise ModelError(
                f"{path}: {error}; correct it, or set generation_config to off"
            ) from None
    if defaults:
        named = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
        _log.info("defaults from %s: %s", GENERATION_FILE, named)
    return defaults
