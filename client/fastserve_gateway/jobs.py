"""Runs the jobs of one request: each prompt ``n`` times. They end together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from fastserve_client.cancelling import cancel_all
from fastserve_client.errors import ClientError
from fastserve_client.options import Message, Prompt, RequestOptions
from fastserve_client.request import EncodedMessages
from fastserve_client.results import Chunk, Completion

from fastserve_gateway.fleet.fleet import Fleet
from fastserve_gateway.request_traces import note_move, trace_context

# The server refuses a bad job within this time.
_REFUSAL_S = 0.2


@dataclass(frozen=True, slots=True)
class CompletionJob:
    """One choice of the answer. Its index there is its index in the list of jobs."""

    prompt: Prompt
    request_id: str
    """Appears in the server's logs."""
    options: RequestOptions
    on_chunk: Callable[[Chunk], None] | None = None
    """If the whole answer is wanted, it is called with each chunk of it."""


def encoded_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts in a form that takes no time to send: a long conversation is encoded here.

    Raises InvalidRequest: a message that JSON cannot carry.
    """
    return [
        EncodedMessages(cast("Sequence[Message]", prompt)) if _is_conversation(prompt) else prompt
        for prompt in prompts
    ]


def _is_conversation(prompt: Prompt) -> bool:
    return bool(prompt) and isinstance(prompt[0], Mapping)


async def complete_all(
    fleet: Fleet, jobs: Sequence[CompletionJob], on_part: Callable[[Chunk | Completion], None]
) -> list[Completion]:
    """Runs all jobs. The first error cancels the others, and so does a cancellation.

    Args:
        on_part: called with each part of an answer, before the next one is read. It may raise.

    Raises ClientError, and what ``on_part`` raises.
    """
    tasks = [asyncio.ensure_future(_complete(fleet, job, on_part)) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    except ClientError:
        await _await_refusals(tasks)
        raise
    finally:
        await cancel_all(tasks)


async def stream_all(
    fleet: Fleet, jobs: Sequence[CompletionJob]
) -> AsyncGenerator[tuple[int, Chunk]]:
    """Yields chunks of all jobs as they come, with the index of their job.

    Closing the generator cancels running jobs. Raises ClientError.
    """
    if len(jobs) == 1:  # most requests are so, and this is quicker
        async with aclosing(_stream(fleet, jobs[0])) as chunks:
            async for chunk in chunks:
                yield 0, chunk
        return
    # Bounded: a slow reader stops the reading of the jobs, and gRPC's flow control does the rest.
    queue: asyncio.Queue[tuple[int, Chunk | Exception]] = asyncio.Queue(maxsize=len(jobs))

    async def read(index: int) -> None:
        try:
            async with aclosing(_stream(fleet, jobs[index])) as chunks:
                async for chunk in chunks:
                    await queue.put((index, chunk))
        except Exception as error:  # the generator raises it
            await queue.put((index, error))

    tasks = [asyncio.ensure_future(read(index)) for index in range(len(jobs))]
    try:
        num_running = len(jobs)
        while num_running:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            num_running -= item.finish_reason is not None
            yield index, item
    except ClientError:
        await _await_refusals(tasks)
        raise
    finally:
        await cancel_all(tasks)


async def _complete(
    fleet: Fleet, job: CompletionJob, on_part: Callable[[Chunk | Completion], None]
) -> Completion:
    # Log-probabilities take so much memory that they must not come all at once.
    if job.on_chunk is None and job.options.get("logprobs") is None:
        return await fleet.generate(
            job.prompt,
            request_id=job.request_id,
            trace_context=trace_context(),
            on_moved=note_move,
            on_part=on_part,
            **job.options,
        )
    chunks = []
    async with aclosing(_stream(fleet, job)) as stream:
        async for chunk in stream:
            on_part(chunk)
            if job.on_chunk is not None:
                job.on_chunk(chunk)
            chunks.append(chunk)
    return Completion.from_chunks(chunks)


def _stream(fleet: Fleet, job: CompletionJob) -> AsyncGenerator[Chunk]:
    return fleet.stream(
        job.prompt,
        request_id=job.request_id,
        trace_context=trace_context(),
        on_moved=note_move,
        **job.options,
    )


async def _await_refusals(tasks: Sequence[asyncio.Future[Any]]) -> None:
    # A mistake in one job is mostly in all of them. Give the server time to refuse the others:
    # cancelling a call that is about to end with an error can keep tritonserver 24.10 from
    # unloading the model.
    await asyncio.wait(tasks, timeout=_REFUSAL_S)
