"""The models of a server: their names, and how they share its machine."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from fastserve_client.protocol import MODEL_NAME

from fastserve_backend.config import EngineConfig
from fastserve_backend.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)
_NOT_IN_A_NAME = re.compile(r"[^a-z0-9_.]+")


def name_models(configs: Sequence[EngineConfig], names: Sequence[str]) -> dict[str, EngineConfig]:
    """Each configuration by the name of its Triton model.

    Args:
        names: in the order of ``configs``; empty: one model is ``fastserve``, and several have the
            last part of their id or path.

    Raises:
        ConfigError: the number of names differs, a name is invalid, or two are equal.
    """
    if not names:
        one = len(configs) == 1
        names = [MODEL_NAME] if one else [_short_name(config.model.model) for config in configs]
    if len(names) != len(configs):
        raise ConfigError(
            f"name: got {len(names)} for {len(configs)} models; give one for each, in their order"
        )
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"name: got {name!r}; must be 1 to 64 letters, digits, '_', '.' or '-', the first "
                "of them a letter or a digit"
            )
        if names.count(name) > 1:
            raise ConfigError(f"name: {name!r} would be two models; give each another --name")
    return dict(zip(names, configs, strict=True))


def _short_name(model: str) -> str:
    """Of a Hugging Face id, with or without a revision, a directory, or a file."""
    last = model.rstrip("/").rpartition("/")[2].lower()
    last = last.partition("@")[0].removesuffix(".gguf")
    return _NOT_IN_A_NAME.sub("-", last).strip("-._")


def divide_machine(models: Mapping[str, EngineConfig]) -> dict[str, EngineConfig]:
    """The configurations with their shares of cores, memory and GPUs.

    What a configuration sets stands. The others divide what is left of the default evenly:
    ``host_share``, ``device_memory_utilization`` among models that may be on a GPU, and
    ``swap_space_gib``.

    Raises:
        ConfigError: the shares of all models are more than the machine, or leave nothing for a
            model that sets none.
    """
    divided = dict(models)
    if len(models) == 1:
        return divided
    on_gpus = {name: config for name, config in models.items() if config.model.device != "cpu"}
    for key, sharing in (("host_share", models), ("device_memory_utilization", on_gpus)):
        for name, share in _shares(key, sharing).items():
            divided[name] = divided[name].with_keys(**{key: share})
    for name, config in models.items():
        if not config.sets("swap_space_gib"):
            share = config.kv_cache.swap_space_gib / len(models)
            divided[name] = divided[name].with_keys(swap_space_gib=share)
    return divided


def _shares(key: str, models: Mapping[str, EngineConfig]) -> dict[str, float]:
    """A share for each model that sets none."""
    values = {name: _value(config, key) for name, config in models.items()}
    given = {name: values[name] for name, config in models.items() if config.sets(key)}
    total = math.fsum(given.values())
    if total > 1.0 + 1e-9:
        raise ConfigError(_refusal(key, given, "together they must not exceed 1"))
    open_names = [name for name in models if name not in given]
    if not open_names:
        return {}
    left = _value(EngineConfig(), key) - total
    if left <= 0.0:
        raise ConfigError(_refusal(key, given, f"which leaves nothing for {', '.join(open_names)}"))
    return dict.fromkeys(open_names, left / len(open_names))


def _value(config: EngineConfig, key: str) -> float:
    section = config.parallel if key == "host_share" else config.kv_cache
    value = getattr(section, key)
    assert isinstance(value, float)
    return value


def _refusal(key: str, given: Mapping[str, float], why: str) -> str:
    shares = ", ".join(f"{share:g} of {name}" for name, share in given.items())
    return f"{key}: got {shares}; {why}; lower them, or set none and they are divided evenly"
