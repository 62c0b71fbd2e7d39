"""Codex, which speaks OpenAI's Responses API."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from agent_program import KNOWN_TO_CODEX, AgentProgram, StartAgent
from conductor import SUMMARY, Call, Conductor, Ramble, Say
from fastserve_backend.serving.launch import TritonServer
from serving_client import unfinished_jobs
from waiting import wait_for

# A sandbox needs rights that a container seldom has.
EXEC = ("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access")
COMPACTION = "CONTEXT CHECKPOINT COMPACTION"
PATCH = """\
*** Begin Patch
*** Update File: notes.txt
@@
 one
-two
+three
*** End Patch
"""


@pytest.fixture
def codex(start_agent: StartAgent) -> AgentProgram:
    return start_agent("codex")


@pytest.mark.parametrize("is_known", [False, True], ids=["a shell", "a tool of free text"])
def test_reads_edits_answers_resumes(
    playing: Conductor, start_agent: StartAgent, work: Path, is_known: bool
) -> None:
    """It patches files with a command of its shell, or with a tool if it knows the model."""
    codex = start_agent("codex", "--model", KNOWN_TO_CODEX if is_known else "fastserve")
    command = f"apply_patch <<'EOF'\n{PATCH}EOF\n"
    edit = Call("apply_patch", PATCH) if is_known else Call("exec_command", {"cmd": command})
    playing.play(Call("exec_command", {"cmd": "cat notes.txt"}), edit, Say("Edited."))
    assert "Edited." in codex.run(*EXEC, "Change two to three.")
    assert (work / "notes.txt").read_text(encoding="utf-8") == "one\nthree\n"
    playing.play(Say("Two to three."))
    assert "Two to three." in codex.run(*EXEC, "resume", "--last", "What did you change?")
    assert "Edited." in json.dumps(playing.of(Say("Two to three.")).request["input"])


def test_compacts(playing: Conductor, codex: AgentProgram) -> None:
    playing.aside_mark = COMPACTION
    count = Call("exec_command", {"cmd": "seq 10000 19999", "max_output_tokens": 10_000})
    playing.play(count, Say("Counted."), Say("After."))
    limit = ("-c", "model_auto_compact_token_limit=12000")
    assert "Counted." in codex.run(*limit, *EXEC, "Count.")
    assert "After." in codex.run(*limit, *EXEC, "resume", "--last", "And now?")
    assert SUMMARY in json.dumps(playing.of(Say("After.")).request["input"])


def test_cancels(playing: Conductor, codex: AgentProgram, agent_server: TritonServer) -> None:
    playing.play(Ramble())
    with codex.interrupted(*EXEC, "Write."):
        wait_for(lambda: any(one.has_begun() for one in playing.exchanges))
    wait_for(lambda: unfinished_jobs(agent_server.endpoints.metrics_url) == 0)
    assert playing.of(Ramble()).was_cut
