"""An engine in a process of its own, which gets jobs and gives tokens as lines of JSON.

Argument: the engine's limits, a JSON object.
In:  ``{"number": 7, "prompt": [312, …], "max_tokens": 64}``, a job.
Out: ``{"ready": "llama-cpp-python 0.3.36"}`` once, then ``{"tokens": [[7, 1213], …]}`` after each
step: pairs of a job's number and its next token. ``{"error": "…"}`` says that a job failed.

Decoding is greedy, and end tokens do not end a job. The process ends with its input. This module
runs in the environment of each engine, so it needs nothing but Python.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol

Tokens = Sequence[tuple[int, int]]
"""Pairs of a job's number and a token."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What every engine gets."""

    model: str
    """A GGUF file."""
    threads: int
    max_num_seqs: int
    """Most jobs in a step."""
    max_num_batched_tokens: int
    """Most tokens in a step."""
    max_model_len: int
    """Most tokens of a job, prompt and answer."""
    kv_tokens: int
    """Tokens in the KV cache."""

    @classmethod
    def parse(cls) -> Limits:
        """Reads this process's first argument, a JSON object."""
        return cls(**json.loads(sys.argv[1]))


@dataclass(slots=True)
class Job:
    number: int
    prompt: list[int]
    max_tokens: int


class Lines:
    """Standard input and output. What the engine itself prints goes to standard error."""

    def __init__(self) -> None:
        self._output = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def jobs(self) -> Iterator[Job]:
        return (Job(**json.loads(line)) for line in sys.stdin)

    def write_ready(self, package: str) -> None:
        self._write({"ready": f"{package} {version(package)}"})

    def write_tokens(self, tokens: Tokens) -> None:
        self._write({"tokens": tokens})

    def write_error(self, message: str) -> None:
        self._write({"error": message})

    def _write(self, line: dict[str, Any]) -> None:
        print(json.dumps(line), file=self._output, flush=True)


class SteppedEngine(Protocol):
    def add(self, job: Job) -> None: ...

    def has_jobs(self) -> bool: ...

    def step(self) -> Tokens:
        """Runs an iteration of all jobs that it has room for; returns their new tokens."""


def serve_steps(engine: SteppedEngine, lines: Lines) -> None:
    """Steps the engine whenever it has jobs, until the input ends. New jobs join between steps."""
    arrived: queue.SimpleQueue[Job | None] = queue.SimpleQueue()

    def read() -> None:
        for job in lines.jobs():
            arrived.put(job)
        arrived.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        while not engine.has_jobs() or not arrived.empty():
            job = arrived.get()
            if job is None:
                return
            engine.add(job)
        lines.write_tokens(engine.step())
