"""An engine whose policy comes from an installed package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from installed_policy import environment_with, example, install_policies

HOST = """
import sys
from fastserve_backend import LLM, SamplingParams
from fastserve_backend.system.logs import log_to_stderr
log_to_stderr()
model, tokenizer = sys.argv[1:]
with LLM(model, tokenizer=tokenizer, policy="prompt_deadline", device_blocks=100) as llm:
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    answers = llm.generate(["Hello", "Hi"], params, progress=False)
    print([len(answer.token_ids) for answer in answers])
"""


def test_a_registered_policy_schedules_an_engine(
    checkpoint: Path, tokenizer: Path, tmp_path: Path
) -> None:
    install_policies(tmp_path, *example())
    done = subprocess.run(
        [sys.executable, "-c", HOST, str(checkpoint), str(tokenizer)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment_with(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[5, 5]\n"
    assert "prompt_deadline: at most" in done.stderr
