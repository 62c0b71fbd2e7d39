"""``fastserve launch``: a coding agent, with this gateway in place of its maker's service.

The agent takes the place of this process if a gateway runs. If not, this process waits for the
agent, and then ends the server and the gateway that it started.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from http.client import HTTPException
from typing import Any, NamedTuple, NoReturn
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from fastserve_client.protocol import MODEL_NAME
from rich.console import Console
from rich.markup import escape

from fastserve_backend.cli.agents import AGENTS, KEY_VARIABLE, Agent, Target
from fastserve_backend.cli.own_gateway import end_on_signals, own_gateway, run_until_it_ends
from fastserve_backend.errors import ConfigError

DEFAULT_GATEWAY_URL = "http://127.0.0.1:9000"
_TIMEOUT_S = 10.0


class NoGatewayError(ConfigError):
    """Nothing answers at the gateway's address."""


def launch_agent(
    name: str,
    arguments: Sequence[str],
    *,
    url: str | None,
    model: str | None,
    serve: str | None,
) -> int:
    """Run the agent, which gets ``arguments``. The gateway's key is in the environment.

    Args:
        url: of a gateway that must run; None: the one at ``DEFAULT_GATEWAY_URL`` or, if none runs
            there, one of its own.
        model: its name at the gateway; None: that of the only or first model.
        serve: arguments of ``fastserve serve``, for a gateway of its own. None: the embedded model.

    Returns:
        the agent's exit code, if the gateway is its own. Else this process becomes the agent.

    Raises:
        ConfigError: the agent is not installed, there is no gateway, or it does not serve the model
            to this key.
        FastServeError: the server or the gateway does not start.
    """
    agent = _Agent.find(name, arguments)
    if url is not None and serve is not None:
        raise ConfigError(
            "serve: not allowed with --url, at which a gateway runs; give one of them"
        )
    if serve is None:
        try:
            agent.become(_target(url or DEFAULT_GATEWAY_URL, model or MODEL_NAME))
        except NoGatewayError:
            if url is not None:
                raise
    end_on_signals()
    console = Console(stderr=True, highlight=False)
    with ExitStack() as at_end:
        with console.status("") as status:  # a line of a terminal, which the agent gets then
            services = own_gateway(serve or "", lambda text: status.update(escape(text)))
            gateway = at_end.enter_context(services)
        target = _target(gateway.url, model or gateway.models[0])
        shown = f"{target.model} at {target.api_url}, with a context of {target.context_tokens}"
        console.print(f"{name}: {shown} tokens", markup=False, soft_wrap=True)
        return run_until_it_ends(*agent.command(target))


class _Agent(NamedTuple):
    """An installed agent, and the user's arguments for it."""

    program: str
    kind: Agent
    arguments: Sequence[str]

    @classmethod
    def find(cls, name: str, arguments: Sequence[str]) -> _Agent:
        """Raises ConfigError: it is not installed."""
        program = shutil.which(name)
        if program is None:
            package = AGENTS[name].package
            raise ConfigError(f"there is no program {name!r}; install it: npm install -g {package}")
        return cls(program, AGENTS[name], arguments)

    def command(self, target: Target) -> tuple[list[str], dict[str, str]]:
        """Its command line and its environment."""
        settings = self.kind.settings(target)
        command = [self.program, *settings.arguments, *self.arguments]
        return command, {**os.environ, **settings.environment}

    def become(self, target: Target) -> NoReturn:
        command, environment = self.command(target)
        os.execve(self.program, command, environment)


def _target(url: str, model: str) -> Target:
    """Raises ConfigError: as ``launch_agent`` does."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"url: got {url!r}; must begin with http:// or https://")
    url, key = url.rstrip("/").removesuffix("/v1"), os.environ.get(KEY_VARIABLE, "none")
    return Target(url, model, key, _context_tokens(url, model, key))


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
        raise NoGatewayError(
            f"there is no gateway at {url} ({error}); start one: fastserve serve, and beside it "
            "fastserve gateway; or leave --url out"
        ) from None
    return found
