"""The engine's configuration. The same models read ``engine.yaml`` and give ``fastserve serve`` its
flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from fastserve_backend.config_sections import (
    KVCacheSection,
    ModelConfigSection,
    ParallelSection,
    SchedulerSection,
    Section,
    TenantsSection,
)
from fastserve_backend.errors import ConfigError


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that a mapping has twice. PyYAML silently takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # not a known key, so it is refused later
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value}: is here twice; remove one", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class EngineConfig(Section):
    """The whole of ``engine.yaml``."""

    model: ModelConfigSection = ModelConfigSection()
    parallel: ParallelSection = ParallelSection()
    kv_cache: KVCacheSection = KVCacheSection()
    scheduler: SchedulerSection = SchedulerSection()
    tenants: TenantsSection = TenantsSection()

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EngineConfig:
        """Raises ConfigError: one message with all problems of single keys, or if there are none,
        with all combinations of keys that are impossible."""
        try:
            config = cls.model_validate(values)
        except ValidationError as error:
            problems = [_describe(item) for item in error.errors()]
            raise ConfigError("invalid configuration:\n  " + "\n  ".join(problems)) from None
        problems = [
            *config.parallel.impossible_combinations(),
            *config.kv_cache.impossible_combinations(),
            *config.scheduler.impossible_combinations(),
        ]
        if problems:
            raise ConfigError("invalid configuration:\n  " + "\n  ".join(problems))
        return config

    @classmethod
    def from_yaml(cls, path: Path) -> EngineConfig:
        """Raises ConfigError: unreadable file, YAML that is not a mapping, or invalid values."""
        try:
            values = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from None
        if values is None:
            values = {}
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: expected a mapping with the sections model, kv_cache, …")
        return cls.from_dict(values)

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    def with_keys(self, **keys: Any) -> EngineConfig:
        """A validated copy with some keys replaced, in any section.

        Key names are unique over all sections, so that each can be a flag of ``fastserve serve``.
        """
        sections = {key: section for section, keys in self.model_dump().items() for key in keys}
        # Without defaults, so that `sets` still tells them from given keys.
        values = self.model_dump(exclude_unset=True)
        for key, value in keys.items():
            if key not in sections:
                known = ", ".join(sorted(sections))
                raise ConfigError(f"{key}: unknown key; known keys are {known}")
            values.setdefault(sections[key], {})[key] = value
        return EngineConfig.from_dict(values)

    def sets(self, key: str) -> bool:
        """Whether a file or a flag gave the key, even if it gave the default."""
        sections = (getattr(self, name) for name in self.model_fields_set)
        return any(key in section.model_fields_set for section in sections)


def _describe(item: Any) -> str:
    # After the key, pydantic's location names the members of a union, which no user knows.
    path = ".".join(str(part) for part in item["loc"][:2])
    if item["type"] == "extra_forbidden":
        return f"{path}: unknown key; remove it or fix its spelling"
    return f"{path}: got {item['input']!r}; {item['msg']}"
