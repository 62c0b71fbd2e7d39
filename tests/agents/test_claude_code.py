"""Claude Code, which speaks Anthropic's messages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from agent_program import StartAgent
from conductor import SUMMARY, Call, Conductor, Ramble, Say
from fastserve_backend.cli.agents import AGENTS, Target
from fastserve_backend.serving.launch import TritonServer
from serving_client import unfinished_jobs
from waiting import wait_for

COMPACTION = "Your task is to create a detailed summary"
SENTENCE = "The quick brown fox jumps over the lazy dog. "
LONG, LONGER = SENTENCE * 1500, SENTENCE * 2400
"""Some 15,000 and 24,000 tokens. The context holds two of the longer beside the instructions."""


def test_reads_edits_answers_resumes(
    playing: Conductor, start_agent: StartAgent, work: Path
) -> None:
    claude = start_agent("claude")
    notes = str(work / "notes.txt")
    change = {"file_path": notes, "old_string": "two", "new_string": "three"}
    playing.play(Call("Read", {"file_path": notes}), Call("Edit", change), Say("Edited."))
    answer = claude.run("-p", "Change two to three.", "--permission-mode", "acceptEdits")
    assert "Edited." in answer
    assert (work / "notes.txt").read_text(encoding="utf-8") == "one\nthree\n"
    playing.play(Say("Two to three."))
    assert "Two to three." in claude.run("-p", "--continue", "What did you change?")
    assert "Edited." in json.dumps(playing.of(Say("Two to three.")).request["messages"])


def test_compacts_in_time(playing: Conductor, start_agent: StartAgent) -> None:
    playing.aside_mark = COMPACTION
    claude = start_agent("claude")
    playing.play(Say("First."), Say("Second."), Say("Short again."))
    claude.run("-p", "Read this.", text=LONG)
    claude.run("-p", "--continue", "Read this, too.", text=LONG)
    assert "Short again." in claude.run("-p", "--continue", "And now?", text=LONG)
    messages = json.dumps(playing.of(Say("Short again.")).request["messages"])
    assert SUMMARY in messages
    assert messages.count(SENTENCE) < 2 * LONG.count(SENTENCE)


def test_compacts_when_told(playing: Conductor, start_agent: StartAgent, work: Path) -> None:
    playing.aside_mark = COMPACTION
    claude = start_agent("claude")
    notes = str(work / "notes.txt")
    playing.play(Call("Read", {"file_path": notes}), Say("Read."), Say("After."))
    claude.run("-p", "Read my notes.")
    claude.run("-p", "--continue", "/compact")
    assert "After." in claude.run("-p", "--continue", "And now?")
    assert SUMMARY in json.dumps(playing.of(Say("After.")).request["messages"])


def test_compacts_after_a_refusal(playing: Conductor, start_agent: StartAgent) -> None:
    """Nobody has told it how long the model's context is, so it learns it from the error."""
    playing.aside_mark = COMPACTION
    settings = AGENTS["claude"].settings(Target(playing.url, "fastserve", "none", None))
    claude = replace(start_agent("claude"), launched_with=(), environment=settings.environment)
    playing.play(Say("First."), Say("Second."), Say("Third."))
    claude.run("-p", "Read this.", text=LONGER)
    claude.run("-p", "--continue", "Read this, too.", text=LONGER)
    assert "Third." in claude.run("-p", "--continue", "And this.", text=LONGER)
    refused = [one for one in playing.exchanges if one.error()]
    assert [one.status for one in refused] == [400]
    assert "prompt is too long" in refused[0].error()
    playing.exchanges.remove(refused[0])


def test_cancels(playing: Conductor, start_agent: StartAgent, agent_server: TritonServer) -> None:
    playing.play(Ramble())
    with start_agent("claude").interrupted("-p", "Write."):
        wait_for(lambda: any(one.has_begun() for one in playing.exchanges))
    wait_for(lambda: unfinished_jobs(agent_server.endpoints.metrics_url) == 0)
    assert playing.of(Ramble()).was_cut
