"""Driving an engine with real ranks from a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from collector import Collector
from fastserve_backend import LLM, SamplingParams
from waiting import DEADLINE_S


@contextmanager
def small_engine(checkpoint: Path, tokenizer: Path, **options: object) -> Iterator[LLM]:
    # Each block makes checking the tables slower, host blocks included.
    keys = {"max_num_seqs": 4, "device_blocks": 60, "swap_space_gib": 0.02} | options
    with LLM(str(checkpoint), tokenizer=str(tokenizer), check_integrity=True, **keys) as llm:
        yield llm


def start_job(llm: LLM, params: SamplingParams) -> Collector:
    """Submits a job, and returns when it has its first token."""
    sink = Collector()
    llm.engine.submit("j", [5], params, sink)
    assert sink.started.wait(DEADLINE_S)
    return sink


def rank_of(llm: LLM) -> psutil.Process:
    (rank,) = [
        child
        for child in psutil.Process().children()
        if "fastserve_backend.worker" in child.cmdline()
        and f"{llm.engine._supervisor.ranks.executor._address}" in " ".join(child.cmdline())  # type: ignore[attr-defined]
    ]
    return rank
