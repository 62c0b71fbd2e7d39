"""Driving an engine with real ranks from a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastserve_backend import LLM
from waiting import wait_for


@contextmanager
def small_engine(checkpoint: Path, tokenizer: Path, **options: object) -> Iterator[LLM]:
    # Each block makes checking the tables slower, host blocks included.
    keys = {"max_num_seqs": 4, "device_blocks": 60, "swap_space_gib": 0.02} | options
    with LLM(str(checkpoint), tokenizer=str(tokenizer), check_integrity=True, **keys) as llm:
        yield llm


def wait_until_free(llm: LLM) -> None:
    """Waits until no job has device blocks. A step that was sent ahead may still run for a job that
    has ended."""

    def is_free() -> bool:
        snapshot = llm.engine.snapshot()
        return snapshot.free_blocks == snapshot.num_blocks

    wait_for(is_free)
