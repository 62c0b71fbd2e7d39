"""Finds out that a model answers no more, although its server's connections may hold."""

from __future__ import annotations

import asyncio
import logging

from fastserve_client.aio_client import AsyncFastServeClient
from fastserve_client.cancelling import cancel_all
from fastserve_client.errors import ClientError

logger = logging.getLogger(__name__)

LOOK_S = 0.25
ASK_LOOKS = 4
"""After a second without any answer the model is asked for something."""
LOST_LOOKS = 20
"""After five seconds it is lost. Looks are counted, not seconds: when this process has been paused,
answers lie unread, and that is no silence."""
# A question that only the model's process can answer: for the text of this token.
_TOKEN = 0


class SilenceWatch:
    """Tells whether a model answers. All answers count: tokens, pictures, refusals.

    Args:
        client: its running requests fail when the model is lost.
    """

    def __init__(self, client: AsyncFastServeClient) -> None:
        self._client = client
        self._question: asyncio.Task[bool] | None = None
        self.is_lost = False
        """Whether the model has not answered for so long that it gets nothing more."""

    async def listen(self) -> None:
        """Never returns."""
        num_answers = num_silent = 0
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                is_silent = self._client.num_answers == num_answers
                num_answers = self._client.num_answers
                num_silent = num_silent + 1 if is_silent else 0
                if not is_silent:
                    self._note(is_lost=False)
                elif num_silent % LOST_LOOKS == 0:
                    self._note(is_lost=True)
                    self._client.drop_calls()
                elif num_silent % ASK_LOOKS == 0:
                    self._start_question()
        finally:
            if self._question is not None:
                await cancel_all((self._question,))

    async def answers(self) -> bool:
        """Whether the model answers now. All who ask at the same time share one question, which has
        failed at the latest when the model is lost."""
        question = self._start_question()
        await asyncio.wait((question,))
        return not question.cancelled() and question.result()

    def _start_question(self) -> asyncio.Task[bool]:
        """The question under way, or a new one."""
        if self._question is None or self._question.done():
            self._question = asyncio.create_task(self._ask())
        return self._question

    async def _ask(self) -> bool:
        try:
            await self._client.detokenize((_TOKEN,))
        except ClientError:
            return False
        return True

    def _note(self, *, is_lost: bool) -> None:
        if is_lost == self.is_lost:
            return
        self.is_lost = is_lost
        name, model = self._client.endpoint, self._client.model
        if is_lost:
            limit_s = LOST_LOOKS * LOOK_S
            logger.warning("%s, model %s: lost: no answer for %.0f s", name, model, limit_s)
        else:
            logger.info("%s, model %s: found: it answers again", name, model)
