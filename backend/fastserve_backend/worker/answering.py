"""Answer steps while the next ones are launched."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from fastserve_backend.worker.engine_link import Send
from fastserve_backend.worker.model_runner import Answer

# What the last steps may take when the engine says stop. It kills a rank 5 s after that.
DRAIN_TIMEOUT_S = 4.0


class AnsweringThread:
    """Waits for each step that was launched, and sends its answer, in their order.

    Args:
        connect: makes the function that sends; called by the thread.
        failed: called by the thread with the error that ended it, so that its owner hears of it
            while it waits for something else.
    """

    def __init__(self, connect: Callable[[], Send], failed: Callable[[Exception], None]) -> None:
        self._connect = connect
        self._failed = failed
        self._answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    def put(self, answer: Answer) -> None:
        """Returns at once."""
        self._answers.put(answer)

    def close(self, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Returns when all answers have been sent.

        Raises:
            TimeoutError: they have not been after ``timeout_s``.
            Exception: what the thread raised.
        """
        self._answers.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the device has not ended its last steps after {timeout_s:g} s")
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            send = self._connect()
            while (answer := self._answers.get()) is not None:
                send(answer())
        except Exception as error:
            self._error = error
            self._failed(error)
