"""opencode, which speaks OpenAI's chat completions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from agent_program import AgentProgram, StartAgent
from conductor import SUMMARY, Call, Conductor, Ramble, Say
from fastserve_backend.serving.launch import TritonServer
from serving_client import unfinished_jobs
from waiting import wait_for


@pytest.fixture
def opencode(start_agent: StartAgent) -> AgentProgram:
    """It gets no list of models from the internet, for which it waits at its start."""
    return start_agent(
        "opencode", OPENCODE_DISABLE_MODELS_FETCH="1", OPENCODE_DISABLE_AUTOUPDATE="1"
    )


def test_reads_edits_answers_resumes(
    playing: Conductor, opencode: AgentProgram, work: Path
) -> None:
    notes = str(work / "notes.txt")
    change = {"filePath": notes, "oldString": "two", "newString": "three"}
    playing.play(Call("read", {"filePath": notes}), Call("edit", change), Say("Edited."))
    assert "Edited." in opencode.run("run", "Change two to three.")
    assert (work / "notes.txt").read_text(encoding="utf-8") == "one\nthree\n"
    playing.play(Say("Two to three."))
    assert "Two to three." in opencode.run("run", "--continue", "What did you change?")
    assert "Edited." in json.dumps(playing.of(Say("Two to three.")).request["messages"])


def test_compacts(playing: Conductor, opencode: AgentProgram) -> None:
    line = "0123456789 " * 3
    command = {"command": f"yes '{line}' | head -n 700", "description": "Counts"}
    playing.play(*[Call("bash", command)] * 3, Say("Counted."))
    assert "Counted." in opencode.run("run", "Count.")
    assert SUMMARY in json.dumps(playing.of(Say("Counted.")).request["messages"])


def test_cancels(playing: Conductor, opencode: AgentProgram, agent_server: TritonServer) -> None:
    playing.play(Ramble())
    with opencode.interrupted("run", "Write."):
        wait_for(lambda: any(one.has_begun() for one in playing.exchanges))
    wait_for(lambda: unfinished_jobs(agent_server.endpoints.metrics_url) == 0)
    assert playing.of(Ramble()).was_cut
