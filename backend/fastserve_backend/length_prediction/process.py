"""The loop of the predictor's process: predict when asked, learn when there is time, save."""

from __future__ import annotations

import logging
import select
import time
from collections import OrderedDict, deque
from contextlib import suppress
from pathlib import Path

from fastserve_backend.length_prediction.encoder import Embedding
from fastserve_backend.length_prediction.messages import (
    JobEnded,
    Learned,
    Loaded,
    Predict,
    Predicted,
    ToPredictor,
)
from fastserve_backend.length_prediction.predictor import LengthPredictor
from fastserve_backend.system.packets import Packets

# Embeddings of so many unfinished jobs are kept, at 1.5 KB each; the oldest go first.
MAX_UNFINISHED = 16384
# Jobs that ended while predictions kept the process busy; the oldest go first.
MAX_TO_LEARN = 1024
# What is lost when the process is killed.
SAVE_INTERVAL_S = 60.0
# At the end: saving follows, and the engine waits 5 s for both.
LAST_LESSONS_S = 2.0
_log = logging.getLogger(__name__)


class PredictorLoop:
    """Serves one engine. Predictions come before learning, so that no job waits for a lesson.

    Args:
        engine: the connection to the engine; the loop ends when the engine closes it.
        directory: where the predictor is saved; None: nowhere.
    """

    def __init__(
        self, engine: Packets[ToPredictor], predictor: LengthPredictor, directory: Path | None
    ) -> None:
        self._engine = engine
        self._predictor = predictor
        self._directory = directory
        self._embeddings: OrderedDict[int, Embedding] = OrderedDict()
        self._to_learn: deque[tuple[Embedding, int]] = deque(maxlen=MAX_TO_LEARN)
        self._save_due_s: float | None = None  # None: nothing was learned since the last time

    def run(self) -> None:
        """Returns when the engine is gone; what was learned is saved then."""
        with suppress(OSError):  # the engine is gone
            self._serve()
        learn_by_s = time.monotonic() + LAST_LESSONS_S
        while self._to_learn and time.monotonic() < learn_by_s:
            self._learn()
        if self._save_due_s is not None:
            self._save()

    def _serve(self) -> None:
        """Raises OSError: the engine has closed its end."""
        self._engine.send(Loaded(len(self._predictor)))
        while True:
            if self._wait_for_engine():
                self._engine.flush()
                for message in self._engine.receive():
                    if isinstance(message, Predict):
                        self._predict(message)
                    else:
                        self._end_job(message)
            elif self._to_learn:
                self._learn()
                self._engine.send(Learned(len(self._predictor)))
            if self._save_due_s is not None and time.monotonic() >= self._save_due_s:
                self._save()

    def _wait_for_engine(self) -> bool:
        """Whether there are messages; waits for some if there is nothing else to do."""
        timeout_s: float | None = None
        if self._to_learn:
            timeout_s = 0.0
        elif self._save_due_s is not None:
            timeout_s = max(0.0, self._save_due_s - time.monotonic())
        poller = select.poll()
        poller.register(self._engine, self._engine.events)
        return bool(poller.poll(None if timeout_s is None else timeout_s * 1000))

    def _predict(self, message: Predict) -> None:
        embedding = self._predictor.embed(message.text)
        self._embeddings[message.number] = embedding
        if len(self._embeddings) > MAX_UNFINISHED:
            self._embeddings.popitem(last=False)
        prediction = self._predictor.predict(embedding)
        self._engine.send(Predicted(message.number, prediction.num_tokens, prediction.source))

    def _end_job(self, message: JobEnded) -> None:
        embedding = self._embeddings.pop(message.number, None)
        if embedding is not None and message.num_tokens is not None:
            self._to_learn.append((embedding, message.num_tokens))

    def _learn(self) -> None:
        self._predictor.learn(*self._to_learn.popleft())
        if self._save_due_s is None:
            self._save_due_s = time.monotonic() + SAVE_INTERVAL_S

    def _save(self) -> None:
        self._save_due_s = None
        if self._directory is None:
            return
        try:
            self._predictor.save(self._directory)
        except OSError as error:
            _log.warning("what was learned of lengths is not kept: %s", error)
