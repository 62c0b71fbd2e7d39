"""How coding agents are told to use a gateway: by their environment and flags alone, so that a
user's own configuration of them stays as it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

_NAME = "fastserve"
"""Of the provider, in the configurations of agents."""
KEY_VARIABLE = "FASTSERVE_API_KEY"
_ANSWER_SHARE = 4
"""An answer gets at most one token of so many of the context, so that the conversation has room."""


@dataclass(frozen=True)
class Target:
    """The model that an agent uses."""

    url: str
    """Of the gateway, without a path."""
    model: str
    key: str
    """For a gateway without keys, any."""
    context_tokens: int | None
    """None: no server says it."""

    @property
    def api_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def answer_tokens(self) -> int | None:
        return self.context_tokens and self.context_tokens // _ANSWER_SHARE


@dataclass(frozen=True)
class Settings:
    """What an agent is started with, beside the user's arguments."""

    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Agent:
    package: str
    """At the npm registry. Its program has the agent's name."""
    settings: Callable[[Target], Settings]


def _claude(target: Target) -> Settings:
    """https://code.claude.com/docs/en/llm-gateway"""
    models = ("MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL")
    environment = {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": target.key,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        **{f"ANTHROPIC_{name}": target.model for name in models},
    }
    if target.context_tokens is not None:
        # It takes an unknown model for one with 200,000 tokens. Without a window of its own it
        # compacts a conversation only after a request was refused.
        for name in ("CLAUDE_CODE_MAX_CONTEXT_TOKENS", "CLAUDE_CODE_AUTO_COMPACT_WINDOW"):
            environment[name] = str(target.context_tokens)
        environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(target.answer_tokens)
    return Settings(environment=environment)


def _codex(target: Target) -> Settings:
    """https://developers.openai.com/codex/config-advanced: custom model providers"""
    provider = f"model_providers.{_NAME}"
    fields: dict[str, object] = {
        "model": target.model,
        "model_provider": _NAME,
        f"{provider}.name": "FastServe",
        f"{provider}.base_url": target.api_url,
        f"{provider}.env_key": KEY_VARIABLE,
        f"{provider}.wire_api": "responses",
    }
    if target.context_tokens is not None:
        fields["model_context_window"] = target.context_tokens
    # The values are TOML, whose strings and numbers are those of JSON here.
    flags = [
        text for name, value in fields.items() for text in ("-c", f"{name}={json.dumps(value)}")
    ]
    return Settings(flags, {KEY_VARIABLE: target.key})


def _opencode(target: Target) -> Settings:
    """https://opencode.ai/docs/providers: custom providers"""
    model: dict[str, object] = {"name": target.model}
    if target.context_tokens is not None:
        model["limit"] = {"context": target.context_tokens, "output": target.answer_tokens}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "FastServe",
        "options": {"baseURL": target.api_url, "apiKey": f"{{env:{KEY_VARIABLE}}}"},
        "models": {target.model: model},
    }
    name = f"{_NAME}/{target.model}"
    config = {"model": name, "small_model": name, "provider": {_NAME: provider}}
    environment = {"OPENCODE_CONFIG_CONTENT": json.dumps(config), KEY_VARIABLE: target.key}
    return Settings(environment=environment)


AGENTS: Mapping[str, Agent] = {
    "claude": Agent("@anthropic-ai/claude-code", _claude),
    "codex": Agent("@openai/codex", _codex),
    "opencode": Agent("opencode-ai", _opencode),
}
