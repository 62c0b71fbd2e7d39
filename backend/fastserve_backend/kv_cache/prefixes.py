"""KV that a job need not compute, because other jobs began with the same tokens.

The keys and values of a full block depend only on the block's tokens and on all tokens before it.
So equal prefixes have equal KV, and a job gets it in one of two ways:

* Earlier jobs: a free block keeps its content until it is used again. A job that begins alike takes
  such blocks over.
* Running jobs: a job that begins alike copies their blocks, on the device, before its first step.

In both cases each block belongs to one job. So swapping and freeing need not know about prefixes.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice, takewhile

from fastserve_backend.config import KVCacheSection
from fastserve_backend.job import FinishReason, Job
from fastserve_backend.kv_cache.blocks import BlockPool
from fastserve_backend.kv_cache.costs import SwapCosts

_KEY_BYTES = 32


class PrefixKeys:
    """A key for each full block of a job: a hash of the block's tokens and all tokens before it.

    Keys are computed on demand and kept until the job is forgotten. There are none where prefix
    caching is off. The hash is cryptographic: whoever found two prefixes with one key would get an
    answer to the other prefix.
    """

    def __init__(self, config: KVCacheSection, block_size: int) -> None:
        self.block_size = block_size
        # Strategy defer promises blocks to jobs before they run, and takes none from anyone.
        self.is_on = config.prefix_caching and config.strategy != "defer"
        self._swaps_are_lossy = config.swaps_are_lossy
        self._keys: dict[int, list[bytes]] = {}

    def wanted(self, job: Job) -> Iterator[bytes]:
        """Keys of the blocks that the job may get from others. Its last token is never among them:
        the job has to compute at least one token to get its next one."""
        return self._of(job, job.num_tokens - 1)

    def held(self, job: Job) -> Iterator[bytes]:
        """Keys of the blocks that the job has computed, as far as others may use them."""
        if self._swaps_are_lossy and job.num_swaps:
            return iter(())
        # A step sent ahead may have computed a token behind a stop word. The job has no such token.
        num_tokens = len(job.prompt_ids) + len(job.output_ids)
        return self._of(job, min(job.num_computed, num_tokens))

    def forget(self, job: Job) -> None:
        self._keys.pop(job.number, None)

    def _of(self, job: Job, num_tokens: int) -> Iterator[bytes]:
        num_blocks = num_tokens // self.block_size
        if not self.is_on or num_blocks == 0:
            return
        keys = self._keys.setdefault(job.number, [])
        for block in range(num_blocks):
            if block == len(keys):
                before = keys[-1] if keys else b""
                tokens = _tokens(job, block * self.block_size, self.block_size)
                keys.append(blake2b(before + tokens.tobytes(), digest_size=_KEY_BYTES).digest())
            yield keys[block]


def _tokens(job: Job, start: int, count: int) -> array[int]:
    """``count`` tokens of the prompt and the output, from position ``start`` on."""
    stop, prompt_len = start + count, len(job.prompt_ids)
    if stop <= prompt_len:
        return job.prompt_ids[start:stop]
    return job.prompt_ids[start:] + job.output_ids[max(0, start - prompt_len) : stop - prompt_len]


@dataclass(slots=True)
class PrefixCopies:
    """Copies that ranks make before they run a step: ``from_blocks[i]`` to ``to_blocks[i]``."""

    from_blocks: array[int] = field(default_factory=lambda: array("i"))
    to_blocks: array[int] = field(default_factory=lambda: array("i"))
    sources: set[int] = field(default_factory=set)
    """Numbers of the jobs whose blocks are copied."""


class Prefixes:
    """Knows the prefixes in kept blocks and those of jobs on the device.

    Changes a job's ``num_computed`` when the job takes over kept blocks, and ``num_shared``, the
    tokens that it will copy.

    A job takes over kept blocks when it may run. If it does not run in this round, it gives them
    back, so that a waiting job keeps nothing from a more urgent one.
    """

    def __init__(self, device: BlockPool, keys: PrefixKeys, costs: SwapCosts) -> None:
        self.is_on = keys.is_on
        self._device = device
        self._keys = keys
        self._costs = costs
        self._unused: dict[int, Job] = {}  # took over kept blocks and have not run since
        self._published: dict[int, list[bytes]] = {}  # job → keys of its blocks
        self.published = self._published.keys()
        """Numbers of the jobs that have computed KV which is on the device. A view, since each
        round looks up all its jobs in it."""
        # By key: the jobs that have such a block, in order of coming; a dict as an ordered set.
        self._jobs_with: dict[bytes, dict[int, None]] = {}

    @property
    def num_unused(self) -> int:
        """Blocks that jobs took over which have not run since."""
        return sum(map(self._device.num_held, self._unused))

    def estimate_shared(self, job: Job) -> None:
        """Set ``num_shared`` of a new job, for the policy. It gets no block before it may run."""
        self.plan_copies(job)
        num_kept = self._device.num_kept(self._keys.wanted(job)) * self._device.block_size
        job.num_shared = max(job.num_shared, num_kept)

    def for_round(self, prefilling: Iterable[Job]) -> RoundPrefixes:
        """Give back what was not used in the last round, and start a new one.

        Args:
            prefilling: jobs of unfinished steps that are not offered in the new round.
        """
        for job in list(self._unused.values()):
            self.give_back_of(job)
        return RoundPrefixes(self, self._device, self._keys, self._costs, prefilling)

    # Kept blocks.

    def take_over_kept(self, job: Job) -> None:
        """Give a job without KV the kept blocks of its first tokens."""
        if job.number in self._unused:
            return
        num_blocks = self._device.reuse_kept(job.number, self._keys.wanted(job))
        if num_blocks:
            job.num_computed = num_blocks * self._device.block_size
            self._unused[job.number] = job

    def on_used(self, job: Job) -> int:
        """The job is about to run. Returns how many tokens it took over for that."""
        return job.num_computed if self._unused.pop(job.number, None) is not None else 0

    def give_back(self, num_blocks: int, but_for: Container[int]) -> int:
        """Free at least ``num_blocks`` unused blocks, those taken over last first, or all there are
        but those of the jobs ``but_for``. Returns how many; they keep their content."""
        given, jobs = 0, []
        for number, job in reversed(self._unused.items()):
            if given >= num_blocks:
                break
            if number not in but_for:
                given += self._device.num_held(number)
                jobs.append(job)
        for job in jobs:
            self.give_back_of(job)
        return given

    def give_back_of(self, job: Job) -> None:
        """Free the unused blocks of the job, if it has any: it will not run in this round."""
        if self._unused.pop(job.number, None) is None:
            return
        self._device.release(job.number, self.keys_to_keep(job))
        job.num_shared += job.num_computed  # the policy still counts on it
        job.num_computed = 0

    def keys_to_keep(self, job: Job) -> list[bytes]:
        """Keys of the job's device blocks that keep their content when the job loses them."""
        if not self._device.num_held(job.number) or job.finish_reason is FinishReason.ERROR:
            return []
        return list(self._keys.held(job))

    # Blocks of jobs on the device.

    def publish(self, job: Job) -> None:
        """Let others copy what the job has computed, in all steps that are sent from now on."""
        published = self._published.setdefault(job.number, [])
        for key in islice(self._keys.held(job), len(published), None):
            self._jobs_with.setdefault(key, {})[job.number] = None
            published.append(key)

    def withdraw(self, job: Job) -> None:
        """The job's KV leaves the device. Nobody copies it any more, and the job plans no copies:
        their sources may be gone when it is back."""
        job.num_shared = 0
        for key in self._published.pop(job.number, ()):
            del self._jobs_with[key][job.number]
            if not self._jobs_with[key]:
                del self._jobs_with[key]

    def plan_copies(self, job: Job) -> None:
        """Set ``job.num_shared`` to what the job can copy behind its own blocks."""
        job.num_shared = len(self.sources(job)) * self._device.block_size

    def sources(self, job: Job) -> list[int]:
        """A source job for each missing prefix block, up to the first block that no job holds."""
        found = []
        for key in islice(self._keys.wanted(job), job.num_computed // self._keys.block_size, None):
            if key not in self._jobs_with:
                break
            found.append(next(iter(self._jobs_with[key])))
        return found

    def forget(self, job: Job) -> None:
        """The job ended."""
        self._unused.pop(job.number, None)
        self.withdraw(job)
        self._keys.forget(job)


class RoundPrefixes:
    """The prefixes that the jobs of one round will compute and copy."""

    def __init__(
        self,
        prefixes: Prefixes,
        device: BlockPool,
        keys: PrefixKeys,
        costs: SwapCosts,
        prefilling: Iterable[Job],
    ) -> None:
        self.copies = PrefixCopies()
        """The copies that this round's step makes."""
        self._prefixes = prefixes
        self._device = device
        self._keys = keys
        self._costs = costs
        self._to_publish: list[Job] = []  # when the step is sent
        # Keys of blocks that this round's step computes, or a prefill in flight.
        self._coming: set[bytes] = set()
        for job in prefilling:
            if job.finish_reason is None and job.num_pending == 0:  # a chunk runs, others follow
                self._coming.update(self._keys.wanted(job))

    def find(self, job: Job, *, may_take_over: bool, may_copy: bool) -> None:
        """Find the prefix of a job that has computed nothing.

        Args:
            may_take_over: it gets the kept blocks of its first tokens.
            may_copy: it plans to copy what is missing then.
        """
        if may_take_over:
            self._prefixes.take_over_kept(job)
        if may_copy:
            self._prefixes.plan_copies(job)
        else:
            job.num_shared = 0

    def pays_to_wait(self, job: Job) -> bool:
        """Whether a job that has computed nothing starts sooner if it waits for others' prefills.

        Waiting costs the job a step, which is shorter for all others without its prefill.
        """
        if not self._coming:
            return False
        num_ready = self._device.num_full_blocks(job.num_ready)
        keys = islice(self._keys.wanted(job), num_ready, None)
        num_blocks = sum(1 for _ in takewhile(self._coming.__contains__, keys))
        if num_blocks == 0:
            return False
        saved_s = self._costs.prefill_s(num_blocks * self._device.block_size)
        return saved_s >= 2 * self._costs.least_iteration_s

    def on_taken(self, job: Job, num_tokens: int) -> int:
        """The job has blocks for its next ``num_tokens`` tokens: add its copies to the step, and
        publish what it computes once the step is sent.

        Returns:
            tokens in kept blocks that the job took over.
        """
        if job.num_shared:
            self._copy(job)
        self._to_publish.append(job)
        num_blocks = self._device.num_full_blocks(job.num_ready + num_tokens)
        self._coming.update(islice(self._keys.wanted(job), num_blocks))
        return self._prefixes.on_used(job)

    def publish_all(self) -> None:
        """The round's step was sent: publish what its jobs compute."""
        for job in self._to_publish:
            self._prefixes.publish(job)

    def _copy(self, job: Job) -> None:
        first = self._device.num_full_blocks(job.num_computed)
        sources = self._prefixes.sources(job)
        assert len(sources) * self._device.block_size == job.num_shared, "not all is there to copy"
        for index, source in enumerate(sources, first):
            self.copies.from_blocks.append(self._device.table(source)[index])
            self.copies.to_blocks.append(self._device.table(job.number)[index])
            self.copies.sources.add(source)
