"""Typed messages between the engine and the predictor's process, as MessagePack.

They go over a pair of Unix sockets that keep message boundaries: one message a packet, in order.
"""

from __future__ import annotations

from typing import Literal

import msgspec

MAX_MESSAGE_BYTES = 65536
"""Of one packet; the engine cuts texts far below that."""

PredictionSource = Literal["neighbours", "regressor"]
FallbackReason = Literal["cold", "down", "slow"]


class Predict(msgspec.Struct, tag="predict", array_like=True):
    """A job has come: how long will its answer be?"""

    number: int
    text: str


class Ended(msgspec.Struct, tag="ended", array_like=True):
    """The job is over; its embedding is not needed after this."""

    number: int
    num_tokens: int | None
    """Its output tokens, where they are what such a prompt makes; None: nothing to learn."""


class Loaded(msgspec.Struct, tag="loaded", array_like=True):
    """The process answers from now on."""

    num_entries: int


class Predicted(msgspec.Struct, tag="predicted", array_like=True):
    """One to each ``Predict``; where the process cannot, the engine's side answers itself."""

    number: int
    num_tokens: int | None
    """Output tokens; None: there is no prediction, for the reason that ``source`` gives."""
    source: PredictionSource | FallbackReason


class Learned(msgspec.Struct, tag="learned", array_like=True):
    """A job's real length is known to the predictor."""

    num_entries: int
    """In its index."""


ToPredictor = Predict | Ended
FromPredictor = Loaded | Predicted | Learned

encoder = msgspec.msgpack.Encoder()
to_predictor_decoder = msgspec.msgpack.Decoder(ToPredictor)
from_predictor_decoder = msgspec.msgpack.Decoder(FromPredictor)
