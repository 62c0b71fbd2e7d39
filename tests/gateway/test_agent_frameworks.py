"""Agent frameworks run unchanged, but for base URL and key, and reach for nothing else."""

from __future__ import annotations

import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import agents
import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent as TypedAgent
from pydantic_ai import RunContext
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIChatModelSettings
from pydantic_ai.providers.openai import OpenAIProvider
from running_gateway import RunningGateway

DOCS = Path(__file__).parents[2] / "docs"
QUESTION = "What is the weather in Paris?"


@pytest.fixture(autouse=True)
def only_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections to other machines fail, and so does the test."""
    connect = socket.socket.connect

    def checked_connect(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1"):
            pytest.fail(f"a connection to {address}")
        connect(self, address)

    def no_names(host: Any, *arguments: Any, **named: Any) -> Any:
        pytest.fail(f"asks for the address of {host!r}")

    resolve = socket.getaddrinfo
    monkeypatch.setattr(socket.socket, "connect", checked_connect)
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *rest, **named: (resolve if host == "127.0.0.1" else no_names)(
            host, *rest, **named
        ),
    )


@pytest.fixture
async def client(chat_gateway: RunningGateway) -> AsyncIterator[AsyncOpenAI]:
    async with chat_gateway.async_client() as client:
        yield client


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("model_type", [OpenAIResponsesModel, OpenAIChatCompletionsModel])
async def test_openai_agents(client: AsyncOpenAI, model_type: Any, streams: bool) -> None:
    """The first turn calls a tool, and the second one answers."""
    asked: list[str] = []

    @agents.function_tool
    def get_weather(city: str) -> str:
        """The weather in a city."""
        asked.append(city)
        return "It is sunny."

    agents.set_tracing_disabled(True)
    agent = Agent(
        name="weather",
        instructions="Be brief.",
        model=model_type("fastserve", client),
        tools=[get_weather],
        model_settings=ModelSettings(
            temperature=0, max_tokens=200, tool_choice="required", parallel_tool_calls=False
        ),
    )
    if streams:
        result: Any = Runner.run_streamed(agent, QUESTION, max_turns=2)
        kinds = {event.type async for event in result.stream_events()}
        assert kinds >= {"raw_response_event", "run_item_stream_event"}
    else:
        result = await Runner.run(agent, QUESTION, max_turns=2)
    assert asked == ["Paris"]
    assert result.final_output


async def test_openai_agents_continue_a_stored_response(client: AsyncOpenAI) -> None:
    agents.set_tracing_disabled(True)
    agent = Agent(
        name="guide",
        model=OpenAIResponsesModel("fastserve", client),
        model_settings=ModelSettings(temperature=0, max_tokens=32),
    )
    first = await Runner.run(agent, "What is the capital of France? Answer in one word.")
    assert "Paris" in first.final_output
    then = await Runner.run(agent, "And of Italy?", previous_response_id=first.last_response_id)
    assert "Rome" in then.final_output


class City(BaseModel):
    city: str
    country: str


async def test_pydantic_ai(client: AsyncOpenAI) -> None:
    """The first turn calls a tool, and the second one is a typed result."""

    def settings(run: RunContext) -> OpenAIChatModelSettings:
        return {
            "temperature": 0,
            "max_tokens": 100,
            "parallel_tool_calls": False,
            "tool_choice": ["get_country" if run.run_step == 1 else "final_result"],
        }

    agent = TypedAgent(
        OpenAIChatModel("fastserve", provider=OpenAIProvider(openai_client=client)),
        output_type=City,
        instructions="Be brief.",
        model_settings=settings,
    )
    asked: list[str] = []

    @agent.tool_plain
    def get_country(city: str) -> str:
        """The country of a city."""
        asked.append(city)
        return "France"

    result = await agent.run("In which country is Paris? Look it up.")
    assert asked == ["Paris"]
    assert result.output == City(city="Paris", country="France")


def test_the_examples_run(chat_gateway: RunningGateway, capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "agents.md").read_text(encoding="utf-8")
    of_agents, of_pydantic_ai = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for example, printed in ((of_agents, "Paris"), (of_pydantic_ai, "city='Paris'")):
        here = example.replace("http://127.0.0.1:9000", chat_gateway.url)
        exec(compile(here, "example", "exec"), {"__name__": "__main__"})
        assert printed in capsys.readouterr().out
