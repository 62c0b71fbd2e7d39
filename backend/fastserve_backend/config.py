"""The engine's configuration. The same models read ``engine.yaml`` and give ``fastserve serve`` its
flags."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from fastserve_client.validation_words import what_is_allowed
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
            problems = _problems(error.errors())
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
        """Raises ConfigError: unreadable file, YAML that is not a mapping, or invalid values. The
        message names the file."""
        try:
            values = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from None
        if values is None:
            values = {}
        if not isinstance(values, dict):
            sections = ", ".join(cls.model_fields)
            raise ConfigError(f"{path}: must be a mapping with the sections {sections}")
        try:
            return cls.from_dict(values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

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


def _problems(errors: Iterable[Any]) -> list[str]:
    """A line for each key, from pydantic's errors."""
    problems: dict[str, str] = {}
    for item in errors:
        # After the key, pydantic's location names the members of a union, which no user knows.
        path = ".".join(str(part) for part in item["loc"][:2])
        if item["type"] == "extra_forbidden":
            problems[path] = f"{path}: unknown key; {_remedy(*map(str, item['loc']))}"
            continue
        allowed = what_is_allowed(item["type"], item["msg"], "a mapping of keys")
        if path in problems:  # another member of the union
            problems[path] += f" or {allowed.removeprefix('must be ')}"
        else:
            problems[path] = f"{path}: got {item['input']!r}; {allowed}"
    return list(problems.values())


def _remedy(*path: str) -> str:
    """What to do about an unknown key: it may be misspelled or in the wrong section."""
    key = path[-1]
    sections = {
        name: type(field.default).model_fields for name, field in EngineConfig.model_fields.items()
    }
    for name, fields in sections.items():
        if key in fields:
            return f"it belongs in the section {name}"
    known = list(sections if len(path) == 1 else sections[path[0]])
    close = get_close_matches(key, known, n=1)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
