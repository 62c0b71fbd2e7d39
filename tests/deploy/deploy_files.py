"""The files under deploy/ and docker-compose.yml, parsed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
COMPOSE_FILE = ROOT / "docker-compose.yml"
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
KUBERNETES = ROOT / "deploy" / "kubernetes"
PROFILES = ("gpu", "cpu")
# Time to parse a file of a few hundred lines on a loaded machine.
_TOOL_TIMEOUT_S = 120.0


@dataclass
class Stage:
    """The instructions that define how an image of this stage runs."""

    environment: dict[str, str] = field(default_factory=dict)
    user: str = "root"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)


def dockerfile_stage(name: str) -> Stage:
    """The last stage of that name in the Dockerfile."""
    text = re.sub(r"(?m)^\s*#.*\n", "", DOCKERFILE.read_text(encoding="utf-8"))
    stages: dict[str, Stage] = {}
    stage = Stage()
    for line in text.replace("\\\n", " ").splitlines():
        keyword, _, value = line.strip().partition(" ")
        match keyword:
            case "FROM":
                stage = stages.setdefault(value.split(" AS ")[-1], Stage())
            case "ENV":
                stage.environment |= dict(pair.split("=", 1) for pair in shlex.split(value))
            case "USER":
                stage.user = value
            case "ENTRYPOINT":
                stage.entrypoint = json.loads(value)
            case "CMD":
                stage.command = json.loads(value)
    return stages[name]


def compose_file() -> dict[str, Any]:
    """docker-compose.yml as plain YAML, which Compose has not resolved."""
    return yaml.safe_load(COMPOSE_FILE.read_text(encoding="utf-8"))


def compose_config(*profiles: str) -> dict[str, Any]:
    """The file as Docker Compose resolves it. Skips the test where Compose is missing."""
    flags = [flag for profile in profiles for flag in ("--profile", profile)]
    command = [*_compose(), "--file", str(COMPOSE_FILE), *flags, "config", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _compose() -> list[str]:
    standalone = shutil.which("docker-compose", path=str(Path(sys.executable).parent))
    for command in ([standalone] if standalone else [], ["docker", "compose"]):
        if command and shutil.which(command[0]) is not None:
            version = subprocess.run(
                [*command, "version"], capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S
            )
            if version.returncode == 0:
                return command
    pytest.skip("Docker Compose is not installed")
