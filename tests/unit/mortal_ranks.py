"""Ranks that are lost at random moments, and a step loop that continues with new ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from delayed_masks import DelayedMasks
from fastserve_backend.checkpoints.tokenizer import ByteTokenizer
from fastserve_backend.config_sections import KVCacheSection
from fastserve_backend.engine.delivery import TextDelivery
from fastserve_backend.errors import EngineError
from fastserve_backend.kv_cache.costs import SwapCosts
from fastserve_backend.kv_cache.manager import KVManager
from fastserve_backend.kv_cache.session_history import SessionHistory
from fastserve_backend.kv_cache.tiers import TwoTierKV
from fastserve_backend.profile.iteration import LatencyModel
from fastserve_backend.rank_protocol.layer_kinds import ONE_GROUP, LayerKind
from fastserve_backend.rank_protocol.link import Link
from fastserve_backend.rank_protocol.messages import (
    CopyBlocks,
    CopyResult,
    DiskCopy,
    Step,
    StepResult,
)
from fastserve_backend.scheduler.base import Policy
from fastserve_backend.system.clock import VirtualClock
from loop_driver import BLOCK_BYTES, BLOCK_SIZE, Rig, WatchedExecutor
from remembering_ranks import FIRST_TOKEN, NUM_TOKENS, RememberedKV

LINK = Link(0.4, 0.3)
DISK = Link(1.5, 0.5)
END_TOKEN = FIRST_TOKEN + NUM_TOKENS - 1
FOR_EVER = 10**9
DOWN_S = 50.0  # longer than it takes to starve


class MortalRanks(WatchedExecutor):
    """Ranks that are lost at their n-th call.

    Args:
        copy_fails: decides for each copy whether it fails.
    """

    def __init__(
        self,
        model: LatencyModel,
        clock: VirtualClock,
        kv: RememberedKV,
        calls_to_live: int,
        ahead: bool,
        copy_fails: Callable[[], bool],
        kinds: Sequence[LayerKind],
    ) -> None:
        super().__init__(model, clock, LINK, ahead, kinds, DISK)
        self._copy_fails = copy_fails
        self._kv = kv
        self._calls_to_live = calls_to_live
        self._sent: dict[int, CopyBlocks | DiskCopy] = {}
        self._read: deque[tuple[Step, np.ndarray]] = deque()

    def submit(self, step: Step) -> None:
        self._live()
        super().submit(step)
        self._read.append((step, self._kv.read(step)))
        self._unfinished[-1][1].token_ids = self._kv.run(step)

    def copy(self, blocks: CopyBlocks | DiskCopy) -> None:
        self._live()
        super().copy(blocks)
        self._sent[blocks.transfer_id] = blocks

    def collect(self, timeout_s: float | None = None) -> StepResult | CopyResult | None:
        self._live()
        result = super().collect(timeout_s)
        if isinstance(result, CopyResult):
            blocks = self._sent.pop(result.transfer_id)
            if self._copy_fails():
                return msgspec.structs.replace(result, error="no copy, by lot")
            self._kv.copy(blocks)
        elif result is not None:
            step, read = self._read.popleft()  # real ranks may read it as late as now
            assert np.array_equal(self._kv.read(step), read)
        return result

    def check(self) -> None:
        self._live()

    def _live(self) -> None:
        self._calls_to_live -= 1
        assert self._calls_to_live >= -1, "used after they were lost"
        if self._calls_to_live < 0:
            raise EngineError("rank 0 died")


class RecoveringRig(Rig):
    """
    Args:
        lives: numbers of calls after which ranks are lost, one after the other; then no more.
        copy_fails: decides for each copy whether it fails.
    """

    def __init__(
        self,
        policy: Policy,
        lives: list[int],
        num_blocks: int,
        num_host_blocks: int,
        kv_cache: KVCacheSection,
        num_stages: int,
        ahead: bool = False,
        masks: DelayedMasks | None = None,
        copy_fails: Callable[[], bool] = lambda: False,
        kinds: Sequence[LayerKind] = ONE_GROUP,
        rotary_switch: int | None = None,
        history: SessionHistory | None = None,
        num_slots: int = 0,
    ) -> None:
        self.num_slots = num_slots
        self.lives = lives
        self.copy_fails = copy_fails
        self.sizes = (num_blocks, num_host_blocks)
        self.kv_cache = kv_cache
        super().__init__(
            policy,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            num_slots=num_slots,
            disk=DISK,
            link=LINK,
            num_stages=num_stages,
            kv_cache=kv_cache,
            eos_token_ids=(END_TOKEN,),
            ahead=ahead,
            masks=masks,
            kinds=kinds,
            rotary_switch=rotary_switch,
            history=history,
        )

    def make_delivery(self) -> TextDelivery:
        return TextDelivery(ByteTokenizer(300))

    def make_executor(self, model: LatencyModel, link: Link) -> MortalRanks:
        self.model = model
        life = self.lives.pop(0) if self.lives else FOR_EVER
        kv = RememberedKV(*self.sizes, BLOCK_SIZE, self.kinds, self.num_slots)
        return MortalRanks(model, self.clock, kv, life, self.ahead, self.copy_fails, self.kinds)

    def new_kv(self) -> KVManager:
        tiers = TwoTierKV(
            *self.sizes,
            BLOCK_SIZE,
            incremental=self.kv_cache.incremental,
            kinds=self.kinds,
            step_tokens=self.loop.kv.tiers.needs.step_tokens,
            num_disk_blocks=self.num_slots,
        )
        self.pool, self.host = tiers.device, tiers.host
        costs = SwapCosts(self.model, BLOCK_BYTES, LINK, DISK)
        return KVManager(
            tiers,
            self.loop.policy,
            self.kv_cache,
            costs,
            self.counters,
            rotary_switch=self.rotary_switch,
            history=self.history,
        )

    def run_cycle(self, count: int = 1) -> float:
        try:
            return super().run_cycle(count)
        except EngineError:
            self.loop.suspend(self.new_kv())
            self.clock.advance_to(self.clock.now() + DOWN_S)
            self.resume()
            return self.clock.now()

    def resume(self) -> None:
        self.executor = self.make_executor(self.model, LINK)
        self.loop.resume(self.executor, self.new_kv())
