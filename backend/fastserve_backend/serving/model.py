"""A thin layer between Triton's requests and the engine."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import triton_python_backend_utils as pb_utils
from fastserve_client.tracing import open_tracer

from fastserve_backend.config import EngineConfig
from fastserve_backend.engine.engine import Engine
from fastserve_backend.engine.rank_factory import RankFactory
from fastserve_backend.errors import (
    DrainingError,
    FastServeError,
    InvalidRequestError,
    OverloadedError,
)
from fastserve_backend.length_prediction.prompt_text import last_user_words
from fastserve_backend.serving.codec import (
    GenerateRequest,
    Task,
    decode_request,
    decode_task,
    decode_watch,
    refuse_unknown_keys,
)
from fastserve_backend.serving.grpc_status import GRPC_STATUS_HEADER
from fastserve_backend.serving.guard import ParentGuard
from fastserve_backend.serving.job_spans import JobSpans
from fastserve_backend.serving.metrics import MetricsPublisher
from fastserve_backend.serving.preparation import Preparation, is_long_text
from fastserve_backend.serving.responses import ResponseEncoder, WallClock
from fastserve_backend.serving.streaming import (
    Emitter,
    RefusedStream,
    RequestError,
    ResponseChannel,
    ResponseStream,
    unexpected_error,
)
from fastserve_backend.serving.tasks import TaskStream, perform, takes_long
from fastserve_backend.serving.watching import WatchStream
from fastserve_backend.system.clock import MonotonicClock

logger = logging.getLogger(__name__)

# Triton calls finalize when no request is left, so only the engine's last steps take time.
_DRAIN_TIMEOUT_S = 10.0
# Each response waits for tritonserver to take it, so two threads send more responses than one: a
# fifth more on two cores.
_EMITTERS = 2
# Of the server's spans, if the environment has no name.
_SERVICE_NAME = "fastserve"
# Request ids go to logs: they must neither break lines nor fill a disk.
_MAX_REQUEST_ID_CHARS = 128


class ServedModel:
    """A loaded model: its engine, and the threads that send its responses.

    Args:
        name, version: as Triton knows the model.
        rank_factory: its ranks; closed with the engine. If this constructor raises, the caller has
            to close it.
        guard: watches the engine from now on.

    Raises:
        ConfigError, ModelError: the configuration or the model cannot be used.
        EngineError: a rank died, or was not ready in time.
        TracesError: the environment asks for traces that cannot be sent.
    """

    def __init__(
        self,
        name: str,
        version: str,
        config: EngineConfig,
        rank_factory: RankFactory,
        guard: ParentGuard,
    ) -> None:
        self._model_name = name
        self._guard = guard
        clock = MonotonicClock()
        self._tracer = open_tracer(_SERVICE_NAME)
        self._engine = Engine(config, clock=clock, rank_factory=rank_factory)
        self._wall_clock = WallClock(clock)
        self._num_rejected = 0
        self._rejecting = threading.Lock()  # guards it
        self._preparation = Preparation(config.scheduler.max_queued_requests)
        self._metrics = MetricsPublisher(self._engine, name, version, self._count_rejected)
        self._emitters = [Emitter(self._metrics.on_request_change) for _ in range(_EMITTERS)]
        self._next_emitter = cycle(self._emitters)
        guard.watch(self._engine, self._drain, [emitter.current_call for emitter in self._emitters])

    def execute(self, requests: list[Any]) -> None:
        """Accept or refuse each request. The emitters send the responses later. Called by one
        thread; never raises."""
        for request in requests:
            emitter = next(self._next_emitter)
            parameters = _text(request.parameters)  # a JSON object, or empty
            channel = ResponseChannel(
                request.get_response_sender(), errors_end_call=GRPC_STATUS_HEADER in parameters
            )
            try:
                tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
                interval_s = decode_watch(tensors, parameters)
                task = decode_task(tensors, parameters)
                if interval_s is not None:
                    watch = WatchStream(channel, emitter)
                    number = self._engine.watch(interval_s, watch.push)
                    watch.on_accepted(partial(self._engine.unwatch, number))
                elif task is not None:
                    answer = partial(self._perform, task, channel, emitter)
                    self._prepare(answer, channel, emitter, "", is_long=takes_long(task))
                else:
                    wanted = decode_request(tensors, parameters)
                    submit = partial(
                        self._submit_traced, _text(request.request_id), wanted, channel, emitter
                    )
                    is_long = wanted.messages is not None or is_long_text(wanted.text)
                    self._prepare(submit, channel, emitter, wanted.service.tenant, is_long=is_long)
            except Exception as error:
                self._refuse(error, channel, emitter)
        self._metrics.on_request_change()

    def is_ready(self) -> bool:
        """Whether it answers requests. It stays ready while ranks are restarted: its jobs wait."""
        return self._engine.failure is None

    def close(self) -> None:
        """Stop the engine when its last steps have ended."""
        self._guard.release_engine()
        self._preparation.close()
        self._engine.drain(_DRAIN_TIMEOUT_S)
        self._engine.close()  # before the emitters: it may deliver the ends of jobs
        for emitter in self._emitters:
            emitter.close()
        self._metrics.close()
        if self._tracer is not None:
            self._tracer.close()

    def _count_rejected(self) -> int:
        return self._num_rejected + self._engine.counters.refused

    def _drain(self) -> bool:
        """Refuse new requests; returns whether all accepted ones are answered."""
        return (
            self._engine.drain(0.0)
            and not self._preparation.num_unfinished
            and not any(emitter.num_active for emitter in self._emitters)
        )

    def _prepare(
        self,
        work: Callable[[], None],
        channel: ResponseChannel,
        emitter: Emitter,
        tenant: str,
        *,
        is_long: bool,
    ) -> None:
        """Does the work on a request now, or later if it may take long. Raises what it raises now,
        and OverloadedError."""
        if not is_long:
            work()
            return

        def work_or_refuse() -> None:
            try:
                work()
            except Exception as error:
                self._refuse(error, channel, emitter)
            self._metrics.on_request_change()

        self._preparation.add(tenant, work_or_refuse)

    def _refuse(self, error: Exception, channel: ResponseChannel, emitter: Emitter) -> None:
        with self._rejecting:
            self._num_rejected += 1
        emitter.wake(RefusedStream(channel, emitter, _refusal(error)))

    def _perform(self, task: Task, channel: ResponseChannel, emitter: Emitter) -> None:
        emitter.wake(TaskStream(channel, emitter, perform(task, self._engine)))

    def _submit_traced(
        self, request_id: str, wanted: GenerateRequest, channel: ResponseChannel, emitter: Emitter
    ) -> None:
        spans = None
        if self._tracer is not None:
            job = self._tracer.start("job", wanted.trace_context)
            if job.is_recording():  # else it is not sampled
                spans = JobSpans(self._tracer, job, self._engine.clock)
        try:
            self._submit(request_id, wanted, channel, emitter, spans)
        except Exception as error:
            if spans is not None:
                spans.on_refused(error)
            raise

    def _submit(
        self,
        request_id: str,
        wanted: GenerateRequest,
        channel: ResponseChannel,
        emitter: Emitter,
        spans: JobSpans | None,
    ) -> None:
        engine = self._engine
        users_words = wanted.text
        kept = engine.checks.kept_tokens(
            wanted.truncate_prompt_tokens, wanted.params, clips=wanted.clip_max_tokens
        )
        if wanted.text is not None:
            prompt_ids = engine.checks.encode(
                wanted.text, kept, special_tokens=wanted.add_special_tokens
            )
        elif wanted.messages is not None:
            messages = engine.checks.check_conversation(wanted.messages)
            refuse_unknown_keys(messages)
            prompt_ids = engine.checks.encode_chat(
                messages, wanted.chat, kept, special_tokens=wanted.add_special_tokens
            )
            users_words = last_user_words(messages)
        else:
            assert wanted.input_ids is not None
            prompt_ids = engine.checks.accept_ids(wanted.input_ids, kept)
        prompt = ""
        if wanted.include_input:
            prompt = wanted.text if wanted.text is not None else engine.tokenizer.decode(prompt_ids)
        encoder = ResponseEncoder(wanted, prompt, prompt_ids, self._wall_clock, engine.tokenizer)
        interval = engine.config.scheduler.stream_interval if wanted.stream else None
        on_end = None if spans is None else spans.on_end
        tenant = wanted.service.tenant
        stream = ResponseStream(channel, emitter, encoder, interval, tenant, on_end)
        params = wanted.params
        if wanted.clip_max_tokens:
            params = engine.checks.clip_max_tokens(prompt_ids, params)
        job_id = _job_id(request_id or wanted.request_id)
        if spans is not None:
            policy = engine.config.scheduler.policy
            spans.describe(job_id, wanted.service, self._model_name, policy)
        number = engine.submit(
            job_id,
            prompt_ids,
            params,
            stream.push,
            service=wanted.service,
            earlier_ids=wanted.output_ids_so_far,
            prompt_text=users_words,
            trace=None if spans is None else spans.trace,
        )
        stream.on_accepted(lambda: engine.cancel(number))


def _text(read: Callable[[], str]) -> str:
    """The text that ``read`` gets from a request. Over HTTP it may be any bytes."""
    try:
        return read()
    except UnicodeDecodeError as error:
        return error.object.decode(errors="replace")


def _refusal(error: Exception) -> RequestError:
    if isinstance(error, InvalidRequestError):
        return RequestError(str(error), pb_utils.TritonError.INVALID_ARG)
    if isinstance(error, (OverloadedError, DrainingError)):
        return RequestError(str(error), pb_utils.TritonError.UNAVAILABLE)
    if isinstance(error, FastServeError):
        return RequestError(str(error), pb_utils.TritonError.INTERNAL)
    logger.error("a request failed unexpectedly", exc_info=error)
    return unexpected_error()


def _job_id(request_id: str) -> str:
    name = "".join(c for c in request_id if c.isprintable())[:_MAX_REQUEST_ID_CHARS]
    return name or uuid.uuid4().hex
