"""The engine's side of the length predictor: asks it, teaches it, and does without it.

A question that the predictor cannot take at once is answered with "slow", and with "down" where
there is no predictor or it is still loading.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

from fastserve_backend.length_prediction.messages import (
    FromPredictor,
    JobEnded,
    Loaded,
    Predict,
    Predicted,
    from_predictor_decoder,
)
from fastserve_backend.system.helper_process import HelperProcess

# More unanswered questions would be answered too late to be of use: a prediction takes a few
# milliseconds of a core that others use too.
MAX_UNANSWERED = 256
# Ends of jobs, some ten bytes each, that wait for a predictor that is busy.
MAX_UNSENT_BYTES = 1 << 16
# Importing torch and reading the encoder takes seconds; at low priority, beside others that use all
# cores, minutes. Nobody waits for it.
LOAD_TIMEOUT_S = 600.0
# A process that does not answer for so long is stopped or has lost its way. Far above what a
# prediction takes at low priority beside ranks that use all cores.
ANSWER_TIMEOUT_S = 30.0
# How long saving what was learned may take at the end.
STOP_TIMEOUT_S = 5.0
_log = logging.getLogger(__name__)


class PredictorClient(HelperProcess[FromPredictor]):
    """Owns the predictor's process. ``ask``, ``tell_end`` and ``close`` may be called from any
    thread, and the first two return at once.

    What a process had learned since it last saved is lost when it dies.

    Args:
        arguments: those of ``python -m fastserve_backend.length_prediction``.
        on_answer: called once for each question, by the thread that asked or by the helper's; must
            return at once.
    """

    name = "the length predictor"
    meanwhile = "jobs run without predictions until it is back"

    def __init__(self, arguments: Sequence[str], on_answer: Callable[[Predicted], None]) -> None:
        command = ["-m", "fastserve_backend.length_prediction", *arguments]
        super().__init__(command, from_predictor_decoder)
        self._on_answer = on_answer
        self._unanswered: dict[int, float] = {}  # job → when it was asked for, oldest first
        self.is_loaded = False
        """Whether there is a process that answers."""
        self.num_entries = 0
        """Entries of the predictor's index, as it last said."""
        self.start()

    def ask(self, number: int, text: str) -> None:
        """Ask how many output tokens this job will have. The answer comes later."""
        with self.lock:
            sent = (
                len(self._unanswered) < MAX_UNANSWERED
                and not self.num_unsent_bytes
                and self.send(Predict(number, text))
            )
            if sent:
                self._unanswered[number] = time.monotonic()
        if not sent:
            self._on_answer(Predicted(number, None, "slow" if self.is_loaded else "down"))

    def tell_end(self, number: int, num_tokens: int | None) -> None:
        """The job is over; the predictor learns its ``num_tokens``, if given."""
        with self.lock:
            if self.num_unsent_bytes < MAX_UNSENT_BYTES:
                self.send(JobEnded(number, num_tokens))

    def close(self) -> None:
        """Let the process save and end; idempotent."""
        self.stop(STOP_TIMEOUT_S if self.is_loaded else 0.0)

    def on_message(self, message: FromPredictor) -> None:
        if isinstance(message, Predicted):
            with self.lock:
                del self._unanswered[message.number]
            self._on_answer(message)
            return
        self.num_entries = message.num_entries
        if isinstance(message, Loaded):
            self.is_loaded = True
            _log.info("the length predictor is ready, with %d entries", message.num_entries)

    def patience(self) -> tuple[float, float]:
        if not self.is_loaded:
            return 0.0, LOAD_TIMEOUT_S  # since its start it owes that it is ready
        return next(iter(self._unanswered.values()), math.inf), ANSWER_TIMEOUT_S

    def on_ended(self) -> None:
        with self.lock:
            self.is_loaded = False
            unanswered, self._unanswered = self._unanswered, {}
        for number in unanswered:
            self._on_answer(Predicted(number, None, "down"))
