"""A thread in the stub that ends it with the server or the launcher."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from fastserve_backend.serving.reports import StubReports
from fastserve_backend.serving.runtime import LAUNCHER_VARIABLE, RuntimeDirectory, wait_readable
from fastserve_backend.serving.stall_detector import StallDetector

if TYPE_CHECKING:
    from fastserve_backend.engine.engine import Engine

logger = logging.getLogger(__name__)

# Far longer than any library holds the interpreter's lock while the model loads.
_STUCK_TIMEOUT_S = 30.0
# How long a server may take to end that has been asked to.
_SERVER_END_TIMEOUT_S = 10.0
_REARM_INTERVAL_S = 5.0
# How often the guard looks. Nothing else tells a stub that its server was killed.
_INTERVAL_S = 0.25
# For 15 s. Triton takes a response, or answers a poll, within microseconds; on a starved machine it
# may need a second.
_CALL_LOOKS = 60


class ParentGuard:
    """Polls for events that this process must react to:

    - The server is gone: this process ends at once, and its ranks follow.
    - The launcher is gone: the guard asks the server to end.
    - The engine broke: the guard tells the launcher. Without a launcher it asks the server to end,
      because Triton 24.10 would stay "ready".
    - The launcher wants to stop the server: the guard drains the model and tells the launcher. If
      the launcher then wants the end, unfinished requests end with an error.
    - The server no longer takes responses, so all clients would wait for ever: this process ends at
      once, and the launcher restarts the server.

    Each time it also tells the launcher that this process works, unless the engine's thread has not
    moved: the launcher restarts a server that it does not hear from.

    A second guard needs no interpreter, because a call to a killed server can hold the
    interpreter's lock for ever: when this thread has not run for long, the process ends.

    Triton drains by itself on SIGTERM. But it never finishes if it refused a request on a gRPC
    stream, which pins the model. So the launcher asks the model to drain first.
    """

    def __init__(self, runtime: RuntimeDirectory | None) -> None:
        self._runtime = runtime
        self._server = os.getppid()
        self._launcher = _open_launcher()
        self._engine: Engine | None = None
        self._progress: object = None  # of the engine, when the guard looked last
        self._drain: Callable[[], bool] = lambda: True
        self._calls: list[tuple[StallDetector, Callable[[], int | None]]] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="parent-guard", daemon=True)
        self._thread.start()

    def watch(
        self,
        engine: Engine,
        drain: Callable[[], bool],
        calls: Iterable[Callable[[], int | None]],
    ) -> None:
        """From now on there is an engine.

        Args:
            drain: refuses new requests and returns whether none is left.
            calls: one function for each thread that calls Triton. It returns the number of the
                thread's call under way, or None.
        """
        self._drain = drain
        self._calls = [(StallDetector(_CALL_LOOKS), call) for call in calls]
        self._engine = engine  # last: the thread looks for it first

    def release_engine(self) -> None:
        """The engine is about to be closed."""
        self._engine = None

    def on_failed_load(self) -> None:
        """Call this before the server is told that the model cannot be loaded. The server then ends
        this process, which is guarded until then.

        Without a launcher the server is ending. Who tells it something holds the interpreter's lock
        for ever once it is gone. So this waits for its end, at which the guard ends this process.
        """
        if self._launcher_is_gone():
            self._thread.join(_SERVER_END_TIMEOUT_S)
            self._remove_if_last()

    def close(self) -> None:
        """The model is unloaded: the server itself ends this process."""
        self._closed.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        self._remove_if_last()

    def _run(self) -> None:
        asked_to_end = False
        next_rearm_s = 0.0
        while not self._closed.wait(_INTERVAL_S):
            if time.monotonic() >= next_rearm_s:
                faulthandler.dump_traceback_later(_STUCK_TIMEOUT_S, exit=True)
                next_rearm_s = time.monotonic() + _REARM_INTERVAL_S
            if os.getppid() != self._server:
                logger.error("tritonserver is gone; ending")
                if self._launcher_is_gone() and self._runtime is not None:
                    self._runtime.remove_shared_memory()
                    self._runtime.remove()
                os._exit(1)
            if any(detector.is_stalled(call()) for detector, call in self._calls):
                logger.error("tritonserver takes no responses any more; ending")
                if self._launcher is None:
                    self._ask_server_to_end()
                os._exit(1)
            reason_to_end = None if asked_to_end else self._reason_to_end()
            if reason_to_end is not None:
                logger.error("%s; asking tritonserver to end", reason_to_end)
                self._ask_server_to_end()
                asked_to_end = True
            if self._runtime is not None:
                reports = self._runtime.own_reports()
                self._show_life(reports)
                self._answer_launcher(self._runtime, reports)

    def _remove_if_last(self) -> None:
        """Remove the server's directory if its launcher, whose task that is, has gone."""
        if self._launcher_is_gone() and self._runtime is not None:
            self._runtime.remove()

    def _ask_server_to_end(self) -> None:
        with suppress(ProcessLookupError):  # somebody has just killed it
            os.kill(self._server, signal.SIGTERM)

    def _reason_to_end(self) -> str | None:
        if self._launcher_is_gone():
            return "the launcher is gone"
        engine = self._engine
        return engine.failure if self._launcher is None and engine is not None else None

    def _show_life(self, reports: StubReports) -> None:
        engine = self._engine
        # A broken engine does not move any more; the launcher is told why.
        works = engine is not None and engine.failure is None
        progress = engine.progress if engine is not None and works else None
        if progress is None or progress != self._progress:
            reports.show_life()
        self._progress = progress

    def _answer_launcher(self, runtime: RuntimeDirectory, reports: StubReports) -> None:
        engine = self._engine
        if engine is not None and engine.failure is not None and reports.failure() is None:
            if engine.gave_up:
                reports.gave_up.set()
            reports.report_failure(engine.failure)
        if engine is not None and runtime.end_wanted.is_set():
            engine.close()  # idempotent
        is_due = runtime.drain_wanted.is_set() and not reports.drained.is_set()
        if is_due and (engine is None or self._drain()):
            reports.drained.set()

    def _launcher_is_gone(self) -> bool:
        return self._launcher is not None and bool(wait_readable(0.0, self._launcher))


def _open_launcher() -> int | None:
    """A descriptor that is readable once the launcher has ended; None: there is no launcher."""
    pid = os.environ.get(LAUNCHER_VARIABLE)
    if pid is None:
        return None
    try:
        return os.pidfd_open(int(pid))
    except ProcessLookupError:  # it ended while the server started
        return os.open(os.devnull, os.O_RDONLY)  # always readable
