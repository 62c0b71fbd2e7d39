"""A worker as the load test sees it: a connection to one engine."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fastserve_bench.connection import Request, TimedAnswer
from fastserve_client.errors import ConnectionFailed, RequestTimeout, ServerError

ROOT = Path(__file__).parents[2]

_START_TIMEOUT_S = 600.0
"""A start may convert the model or measure a latency profile."""
_STOP_TIMEOUT_S = 30.0
_LINE_BYTES = 2**20
"""A line has a token of each job."""


@dataclass(slots=True)
class Answer:
    """Tokens so far, and when each was here (``time.monotonic``)."""

    max_tokens: int
    done: asyncio.Future[None]
    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)


class WorkerProcess:
    """One engine in a process of its own; see `worker` for what the two say to each other.

    It is a ``fastserve_bench.connection.Connection``, and also tells every token's time.
    """

    def __init__(self, process: asyncio.subprocess.Process, name: str, log_path: Path) -> None:
        self.name = name
        """Package and version."""
        self.pid = process.pid
        self._process = process
        self._log_path = log_path
        self._answers: dict[int, Answer] = {}
        self._numbers = itertools.count()
        self._failure: str | None = None
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, command: Sequence[str], log_path: Path) -> WorkerProcess:
        """Returns when the engine is ready.

        Args:
            command: runs in the repository's root.
            log_path: file for the engine's own output.

        Raises:
            ConnectionFailed: it ended, or was not ready in time. The message names its log.
        """
        with log_path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=ROOT,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=_LINE_BYTES,
                start_new_session=True,  # Ctrl-C is for the load test, which stops it
            )
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), _START_TIMEOUT_S)
            name = json.loads(line)["ready"]
        except (TimeoutError, ValueError, KeyError):
            _kill(process)
            await process.wait()
            raise ConnectionFailed(f"the engine did not start; see {log_path}") from None
        return cls(process, name, log_path)

    async def check(self) -> None:
        if self._failure is not None:
            raise ConnectionFailed(self._failure)

    async def answer(self, request: Request) -> Answer:
        """The whole answer to a prompt of token ids. Raises ClientError: the engine failed."""
        await self.check()
        assert self._process.stdin is not None
        number = next(self._numbers)
        job = {"number": number, "prompt": request.prompt, "max_tokens": request.max_tokens}
        answer = Answer(request.max_tokens, asyncio.get_running_loop().create_future())
        self._answers[number] = answer
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        await answer.done
        return answer

    async def send(self, request: Request, timeout_s: float) -> TimedAnswer:
        try:
            answer = await asyncio.wait_for(self.answer(request), timeout_s)
        except TimeoutError:
            raise RequestTimeout(f"no whole answer in {timeout_s:g} s") from None
        return TimedAnswer(
            answer.times_s[0], answer.times_s[-1], len(request.prompt), len(answer.token_ids)
        )

    async def close(self) -> None:
        """Ends the process. It has no jobs that anyone waits for."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_TIMEOUT_S)
        except TimeoutError:
            _kill(self._process)
            await self._process.wait()
        await self._reading

    async def _read(self) -> None:
        assert self._process.stdout is not None
        reason = f"the engine ended; see {self._log_path}"
        async for line in self._process.stdout:
            now_s = time.monotonic()
            content = json.loads(line)
            if "error" in content:
                reason = content["error"]
                _kill(self._process)
                break
            for number, token in content["tokens"]:
                answer = self._answers[number]
                answer.token_ids.append(token)
                answer.times_s.append(now_s)
                if len(answer.token_ids) == answer.max_tokens:
                    del self._answers[number]
                    if not answer.done.done():  # nobody waits after a timeout
                        answer.done.set_result(None)
        self._failure = reason
        for answer in self._answers.values():
            if not answer.done.done():
                answer.done.set_exception(ServerError(reason))


def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):  # it has ended
        process.kill()
