"""Build a step loop with its policy and KV manager: for the engine and for the simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fastserve_backend.config_sections import KVCacheSection, SchedulerSection
from fastserve_backend.engine.delivery import Delivery, OnJobEnd
from fastserve_backend.engine.masks import MaskSource
from fastserve_backend.engine.step_loop import StepLoop
from fastserve_backend.executor.base import Executor
from fastserve_backend.kv_cache.costs import SwapCosts
from fastserve_backend.kv_cache.manager import KVManager
from fastserve_backend.kv_cache.session_history import SessionHistory
from fastserve_backend.kv_cache.tiers import TwoTierKV
from fastserve_backend.metrics.counters import EngineCounters
from fastserve_backend.profile.iteration import IterationLoad, LatencyModel
from fastserve_backend.rank_protocol.layer_kinds import ONE_GROUP, LayerKind
from fastserve_backend.rank_protocol.link import NO_LINK, Link
from fastserve_backend.rank_protocol.messages import Ready, Step
from fastserve_backend.scheduler.base import BatchLimits, Policy
from fastserve_backend.scheduler.batch_limits import batch_limits
from fastserve_backend.scheduler.policy_context import make_policy
from fastserve_backend.system.clock import Clock

MakePolicy = Callable[[BatchLimits], Policy]


@dataclass(frozen=True, slots=True)
class KVMemory:
    """KV blocks of all ranks together. Each rank holds a part of every block, and copies it."""

    num_blocks: int
    num_host_blocks: int
    block_bytes: int
    """Size on the host of one block, all layers of its group and all ranks."""
    link: Link
    """Time to copy one block, every rank its part."""
    kinds: tuple[LayerKind, ...] = ONE_GROUP
    """Of the model's layers."""
    num_disk_blocks: int = 0
    disk: Link = NO_LINK
    """Time to write one block of the host to the disk or to read it, every rank its part."""

    @classmethod
    def of_ranks(cls, ready: Ready, kinds: tuple[LayerKind, ...]) -> KVMemory:
        link = Link(ready.block_out_s, ready.block_in_s)
        return cls(
            ready.num_blocks,
            ready.num_host_blocks,
            ready.block_bytes,
            link,
            kinds,
            ready.num_disk_blocks,
            Link(ready.disk_write_s, ready.disk_read_s),
        )


@dataclass(frozen=True, slots=True)
class LoopSetup:
    """Everything that a step loop is built from, except for its ranks."""

    scheduler: SchedulerSection
    kv_cache: KVCacheSection
    latency: LatencyModel
    """Predicts step durations, for the policy, for swapping and for steps ahead."""
    counters: EngineCounters
    max_model_len: int
    rotary_switch: int | None = None
    """Of the model."""
    weights: Mapping[str, float] | None = field(default_factory=dict)
    """Of tenants, as for ``make_policy``."""
    sessions: SessionHistory | None = None
    """Outlives the ranks. None: nothing is held for sessions."""

    def make_kv(self, memory: KVMemory, policy: Policy) -> KVManager:
        """A KV manager for ranks on which no job has KV."""
        tiers = TwoTierKV(
            memory.num_blocks,
            memory.num_host_blocks if self.kv_cache.is_swapping else 0,
            self.kv_cache.block_size,
            incremental=self.kv_cache.incremental,
            kinds=memory.kinds,
            step_tokens=policy.limits.job_tokens,
            num_disk_blocks=memory.num_disk_blocks,
        )
        costs = SwapCosts(self.latency, memory.block_bytes, memory.link, memory.disk)
        return KVManager(
            tiers,
            policy,
            self.kv_cache,
            costs,
            self.counters,
            rotary_switch=self.rotary_switch,
            history=self.sessions,
        )

    def make_loop(
        self,
        memory: KVMemory,
        executor: Executor,
        delivery: Delivery,
        clock: Clock,
        *,
        eos_token_ids: Sequence[int],
        on_job_end: OnJobEnd,
        on_step_finished: Callable[[Step, float], None],
        mask_source: MaskSource | None = None,
        policy_of: MakePolicy | None = None,
        check_integrity: bool = False,
    ) -> StepLoop:
        """Arguments as of ``StepLoop``.

        Args:
            policy_of: makes a policy that the registry does not have.
        """
        policy = self._make_policy(memory, policy_of)
        return StepLoop(
            policy,
            self.make_kv(memory, policy),
            executor,
            delivery,
            clock,
            eos_token_ids=eos_token_ids,
            counters=self.counters,
            predict_s=lambda step: self.latency.iteration_s(IterationLoad.of_step(step)),
            on_job_end=on_job_end,
            on_step_finished=on_step_finished,
            mask_source=mask_source,
            rotary_switch=self.rotary_switch,
            check_integrity=check_integrity,
        )

    def _make_policy(self, memory: KVMemory, policy_of: MakePolicy | None) -> Policy:
        # Of jobs within their windows. Longer jobs take less memory a token.
        num_groups = sum(kind.num_groups for kind in memory.kinds)
        kv_tokens = memory.num_blocks * self.kv_cache.block_size // num_groups
        if policy_of is not None:
            limits = batch_limits(
                self.scheduler,
                self.latency,
                max_model_len=self.max_model_len,
                kv_tokens=kv_tokens,
            )
            return policy_of(limits)
        return make_policy(
            self.scheduler, self.latency, self.max_model_len, kv_tokens, self.weights
        )
