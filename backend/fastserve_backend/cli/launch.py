"""``fastserve launch``: a coding agent, with this gateway in place of its maker's service."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from fastserve_backend.cli.agents import AGENTS, KEY_VARIABLE, Target
from fastserve_backend.errors import ConfigError

_TIMEOUT_S = 10.0


def launch_agent(name: str, arguments: Sequence[str], url: str, model: str) -> None:
    """Become the agent, which gets ``arguments``. The gateway's key is in the environment.

    Raises:
        ConfigError: the agent is not installed, there is no gateway, or it does not serve the model
            to this key.
    """
    agent = AGENTS[name]
    program = shutil.which(name)
    if program is None:
        raise ConfigError(
            f"there is no program {name!r}; install it: npm install -g {agent.package}"
        )
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"url: got {url!r}; must begin with http:// or https://")
    url, key = url.rstrip("/").removesuffix("/v1"), os.environ.get(KEY_VARIABLE, "none")
    target = Target(url, model, key, _context_tokens(url, model, key))
    settings = agent.settings(target)
    command = [program, *settings.arguments, *arguments]
    os.execve(program, command, {**os.environ, **settings.environment})


def _context_tokens(url: str, model: str, key: str) -> int | None:
    """The model's longest context; None: no server says it.

    Raises ConfigError: as of ``launch_agent``.
    """
    models = {one["id"]: one for one in _get(f"{url}/v1/models", key)["data"]}
    if model not in models:
        raise ConfigError(f"model: got {model!r}; the gateway at {url} has {', '.join(models)}")
    tokens = models[model].get("max_model_len")
    return tokens if isinstance(tokens, int) else None


def _get(url: str, key: str) -> Mapping[str, Any]:
    request = Request(url, headers={"Authorization": f"Bearer {key}"})
    try:
        with urlopen(request, timeout=_TIMEOUT_S) as answer:
            found: Mapping[str, Any] = json.load(answer)
    except HTTPError as error:
        remedy = f"set {KEY_VARIABLE} to a key of it" if error.code in (401, 403) else "is it one?"
        raise ConfigError(f"the gateway at {url} answers {error.code}; {remedy}") from None
    except (OSError, HTTPException, ValueError) as error:
        raise ConfigError(
            f"there is no gateway at {url} ({error}); start one: fastserve serve, and beside it "
            "fastserve gateway"
        ) from None
    return found
