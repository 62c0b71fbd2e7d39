"""Typed messages between the engine and the length predictor, as MessagePack."""

from __future__ import annotations

from typing import Literal

import msgspec

PredictionSource = Literal["neighbours", "regressor"]
FallbackReason = Literal["cold", "down", "slow"]


class Predict(msgspec.Struct, tag="predict", array_like=True):
    """A job has arrived: how long will its answer be?"""

    number: int
    text: str


class JobEnded(msgspec.Struct, tag="ended", array_like=True):
    """The job is over; its embedding is not needed after this."""

    number: int
    num_tokens: int | None
    """Output tokens, where the model ended the answer; None: there is nothing to learn."""


class Loaded(msgspec.Struct, tag="loaded", array_like=True):
    """The process answers from now on."""

    num_entries: int
    """Entries of its index."""


class Predicted(msgspec.Struct, tag="predicted", array_like=True):
    """The answer to one ``Predict``. Where the process cannot answer, the engine's side does."""

    number: int
    num_tokens: int | None
    """Output tokens; None: there is no prediction, for the reason that ``source`` gives."""
    source: PredictionSource | FallbackReason


class Learned(msgspec.Struct, tag="learned", array_like=True):
    """The predictor has learned a job's real length."""

    num_entries: int
    """Entries of its index."""


ToPredictor = Predict | JobEnded
FromPredictor = Loaded | Predicted | Learned

to_predictor_decoder = msgspec.msgpack.Decoder(ToPredictor)
from_predictor_decoder = msgspec.msgpack.Decoder(FromPredictor)
