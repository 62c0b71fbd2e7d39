"""The prompt tokens that wait at one server, as one gateway knows them."""

from __future__ import annotations

from typing import Final

from fastserve_gateway.routing.server_load import ServerLoad

STALE_S: Final = 3.0
"""A picture older than this says nothing about the present."""
# A picture that comes so long after a request was sent shows the request.
_SEEN_S = 1.0
# Share of the latest picture in what other gateways are expected to have waiting. Pictures are
# older than what the gateway knows of its own requests, so single ones differ by chance.
_NEWEST_SHARE = 0.5
# Without a picture: speed of prefill, and how much an unfinished request delays the next one.
_USUAL_TOKENS_PER_S = 5000.0
_JOB_S = 0.1


class ServerQueue:
    """What waits at a server before a new request.

    A gateway knows its own requests at once, and those of others from the server's pictures, which
    are older. So it adds its own ones and the part of the pictures that is not its own. Without
    pictures it goes by the number of its unfinished requests.
    """

    def __init__(self) -> None:
        self.wait_s = 0.0
        """Expected seconds until the server begins a new prompt."""
        self.s_per_token = 1 / _USUAL_TOKENS_PER_S
        """Of a prompt."""
        self.num_open = 0
        """Requests of this gateway that have not ended."""
        self._sent: dict[int, tuple[float, float]] = {}  # without a first token: (tokens, when)
        self._own_tokens = 0.0
        self._others_tokens = 0.0
        self._picture_s: float | None = None  # None: there is none, or it is stale

    def on_sent(self, number: int, tokens: float, now_s: float) -> None:
        """A request that computes so many tokens of its prompt is on its way to the server."""
        self.num_open += 1
        self._sent[number] = tokens, now_s
        self._own_tokens += tokens
        self._update()

    def on_first_token(self, number: int) -> None:
        """Once more changes nothing."""
        tokens, _ = self._sent.pop(number, (0.0, 0.0))
        self._own_tokens = max(0.0, self._own_tokens - tokens) if self._sent else 0.0
        self._update()

    def on_end(self, number: int) -> None:
        self.num_open -= 1
        self.on_first_token(number)

    def on_load(self, load: ServerLoad, now_s: float) -> None:
        self._picture_s = now_s
        if load.prefill_tokens_per_s is not None:
            self.s_per_token = 1 / load.prefill_tokens_per_s
        waiting = load.waiting_prompt_tokens
        late = sum(tokens for tokens, sent_s in self._sent.values() if now_s - sent_s < _SEEN_S)
        # Whatever else this gateway believes to wait is in the picture, or has been computed.
        self._own_tokens = late + min(self._own_tokens - late, waiting)
        others = max(0.0, waiting - self._own_tokens)
        self._others_tokens += _NEWEST_SHARE * (others - self._others_tokens)
        self._update()

    def check_age(self, now_s: float) -> None:
        """Forgets a stale picture."""
        if self._picture_s is not None and now_s - self._picture_s > STALE_S:
            self._picture_s = None
            self._update()

    def _update(self) -> None:
        if self._picture_s is None:
            self.wait_s = self.num_open * _JOB_S
        else:
            self.wait_s = (self._own_tokens + self._others_tokens) * self.s_per_token
