"""KV that a job need not compute, because other jobs began with the same tokens.

The keys and values of a full block depend only on the block's tokens and on all tokens before it.
So equal prefixes have equal KV, and a job gets it from others with its ``cache_salt``, in one of
two ways:

* Earlier jobs: a free block keeps its content until it is used again. A job that begins alike takes
  such blocks over.
* Running jobs: a job that begins alike copies their blocks, on the device, before its first step.

In both cases each block belongs to one job. So swapping and freeing need not know about prefixes.

A layer with a window needs only the blocks before the job's first own token that this token sees.
The blocks before those may be gone: a job frees them when it has gone on, and they keep their
content like blocks of ended jobs. So a prefix is of use if layers without a window have all its
blocks, and layers with a window the last ones. The longest such prefix is taken.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice, takewhile

from fastserve_backend.config_sections import KVCacheSection
from fastserve_backend.job import FinishReason, Job
from fastserve_backend.kv_cache.blocks import BlockPool
from fastserve_backend.kv_cache.costs import SwapCosts

_KEY_BYTES = 32
# Jobs that are longer than the model's rotary_switch have other keys and values.
_LONG = b"long"
# Apart from the hashes of blocks: else a salt that is the text of tokens would be their key.
_OF_SALTS = b"cache_salt"


class PrefixKeys:
    """A key for each full block of a job: a hash of the block's tokens and all tokens before it,
    behind the job's ``cache_salt``. So jobs with other salts have no key in common.

    Keys are computed on demand and kept until the job is forgotten. There are none where prefix
    caching is off. The hash is cryptographic: whoever found two prefixes with one key would get an
    answer to the other prefix.
    """

    def __init__(
        self, config: KVCacheSection, block_size: int, rotary_switch: int | None = None
    ) -> None:
        self.block_size = block_size
        self._rotary_switch = rotary_switch
        # Strategy defer promises blocks to jobs before they run, and takes none from anyone.
        self.is_on = config.prefix_caching and config.strategy != "defer"
        self._swaps_are_lossy = config.swaps_are_lossy
        self._keys: dict[int, list[bytes]] = {}
        self._long: set[int] = set()  # jobs that were long when they began to compute

    def wanted(self, job: Job) -> Iterator[bytes]:
        """Keys of the blocks that the job may get from others: none if it needs to compute its
        whole prompt, else those ``of_prefill``."""
        return iter(()) if job.needs_whole_prompt else self.of_prefill(job)

    def of_prefill(self, job: Job) -> Iterator[bytes]:
        """Keys of the blocks that the job has before its next token. Its last token is never among
        them: the job has to compute at least one token to get its next one.

        Only for jobs that have not computed their whole prompt yet, or begin anew."""
        is_long = self._rotary_switch is not None and job.num_tokens > self._rotary_switch
        if is_long and job.number not in self._long:
            self.forget(job)
            self._long.add(job.number)
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
        self._long.discard(job.number)

    def _of(self, job: Job, num_tokens: int) -> Iterator[bytes]:
        num_blocks = num_tokens // self.block_size
        if not self.is_on or num_blocks == 0:
            return
        keys = self._keys.setdefault(job.number, [])
        for block in range(num_blocks):
            if block == len(keys):
                before = keys[-1] if keys else self._root(job)
                tokens = _tokens(job, block * self.block_size, self.block_size)
                keys.append(blake2b(before + tokens.tobytes(), digest_size=_KEY_BYTES).digest())
            yield keys[block]

    def _root(self, job: Job) -> bytes:
        """What comes before the first tokens of the job: the same for jobs that may share KV."""
        kind = _LONG if job.number in self._long else b""
        salt = job.service.cache_salt.encode()
        if not salt:
            return kind
        return kind + blake2b(salt, digest_size=_KEY_BYTES, person=_OF_SALTS).digest()


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
    num_tokens: int = 0
    """Tokens that jobs need not compute, because of the copies."""


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The first blocks of a job that it may get from others."""

    keys: Sequence[bytes]
    """Of the blocks of a group."""
    kept: Sequence[range]
    """For each kind of layers which of these blocks are kept. The job takes them over."""
    num_own: int
    """Blocks of a group that the job has, of all kinds, when it has taken those over."""

    def to_copy(self, kind: int) -> range:
        """The blocks of a group that the job copies for layers of this kind."""
        return range(self.kept[kind].stop, len(self.keys))


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
        self._has_windows = device.has_windows
        self._keys = keys
        self._costs = costs
        self._unused: dict[int, Job] = {}  # took over kept blocks and have not run since
        self._published: dict[int, list[bytes]] = {}  # job → keys of its blocks
        self.published = self._published.keys()
        """Numbers of the jobs that have computed KV which is on the device. A view, since each
        round looks up all its jobs in it."""
        # For each kind of layers, by key: the jobs that have such a block, in order of coming; a
        # dict as an ordered set.
        self._jobs_with: list[dict[bytes, dict[int, None]]] = [{} for _ in device.kinds]

    @property
    def num_unused(self) -> int:
        """Blocks that jobs took over which have not run since."""
        return sum(map(self._device.num_held, self._unused))

    def estimate_shared(self, job: Job) -> None:
        """Set ``num_shared`` of a new job, for the policy. It gets no block before it may run."""
        if self._has_windows:
            hits = [self._hit(job, may_take_over=True, may_copy=True)]
        else:
            hits = [
                self._hit(job, may_take_over=not may_copy, may_copy=may_copy)
                for may_copy in (True, False)
            ]
        job.num_shared = max(len(hit.keys) for hit in hits) * self._device.block_size

    def for_round(self, prefilling: Iterable[Job]) -> RoundPrefixes:
        """Give back what was not used in the last round, and start a new one.

        Args:
            prefilling: jobs of unfinished steps that are not offered in the new round.
        """
        for job in list(self._unused.values()):
            self.give_back_of(job)
        return RoundPrefixes(self, self._device, self._keys, self._costs, prefilling)

    # Kept blocks.

    def take_over(self, job: Job, *, may_take_over: bool, may_copy: bool) -> PrefixHit:
        """Give a job that has computed nothing the kept blocks of its prefix, and set
        ``num_shared`` to what it can copy behind them.

        Args:
            may_take_over: the job may get kept blocks. It must have no blocks, or unused ones.
            may_copy: the job may plan copies.
        """
        may_take_over = may_take_over and job.number not in self._unused
        hit = self._hit(job, may_take_over=may_take_over, may_copy=may_copy)
        if any(hit.kept) and may_take_over:
            self._device.take_kept(job.number, hit.keys, hit.kept)
            job.num_computed = hit.num_own * self._device.block_size
            self._unused[job.number] = job
        job.num_shared = len(hit.keys) * self._device.block_size - job.num_computed
        return hit

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
        keys = self.keys_to_keep(job)
        if self._has_windows:  # some groups may have taken over more blocks than others
            keys = list(islice(self._keys.wanted(job), self._device.end(job.number)))
        self._device.release(job.number, keys)
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
        num_before = len(published)
        published.extend(islice(self._keys.held(job), num_before, None))
        for kind, jobs_with in enumerate(self._jobs_with):
            begin = num_before
            if self._has_windows and len(published) > begin:
                begin = max(begin, self._device.first(job.number, kind))
            for key in islice(published, begin, None):
                jobs_with.setdefault(key, {})[job.number] = None

    def withdraw(self, job: Job) -> None:
        """The job's KV leaves the device. Nobody copies it any more, and the job plans no copies:
        their sources may be gone when it is back."""
        job.num_shared = 0
        published = self._published.pop(job.number, ())
        for kind in range(len(self._jobs_with)):
            self._withdraw_blocks(job, kind, published)

    def on_freed(self, job: Job, freed: Sequence[range]) -> None:
        """For each kind of layers the job has lost these blocks of a group."""
        published = self._published.get(job.number, ())
        for kind, part in enumerate(freed):
            self._withdraw_blocks(job, kind, published[part.start : part.stop])

    def _withdraw_blocks(self, job: Job, kind: int, keys: Iterable[bytes]) -> None:
        """Nobody copies these blocks of the job any more."""
        jobs_with = self._jobs_with[kind]
        for key in keys:
            jobs = jobs_with.get(key, {})
            if job.number in jobs:
                del jobs[job.number]
                if not jobs:
                    del jobs_with[key]

    def source(self, key: bytes, kind: int) -> int:
        """A job from which to copy the block with this key. There must be one."""
        return next(iter(self._jobs_with[kind][key]))

    def forget(self, job: Job) -> None:
        """The job ended."""
        self._unused.pop(job.number, None)
        self.withdraw(job)
        self._keys.forget(job)

    # The longest prefix.

    def _hit(self, job: Job, *, may_take_over: bool, may_copy: bool) -> PrefixHit:
        """What a job that has computed nothing may get from others: first kept blocks, then copies.

        Where layers have windows, the job must not have blocks.
        """
        keys, num_kept = self._first_blocks(job, may_take_over, may_copy)
        if not self._has_windows:
            return PrefixHit(keys, [range(num_kept)], num_kept)
        length = len(keys)
        kept: list[range] = []
        while len(kept) < len(self._device.kinds):
            part, longest = range(min(num_kept, length)), length
            if self._device.kinds[len(kept)].window is not None:
                part, longest = self._last_blocks(len(kept), keys, length, may_take_over, may_copy)
            if longest == length:
                kept.append(part)
            else:  # all kinds again, for a shorter prefix
                length, kept = longest, []
        num_own = min(part.stop for part in kept) if any(kept) else 0
        return PrefixHit(keys[:length], kept, num_own)

    def _first_blocks(
        self, job: Job, may_take_over: bool, may_copy: bool
    ) -> tuple[list[bytes], int]:
        """Keys of the job's first blocks, up to the first that layers without a window cannot get,
        and how many of these blocks the job has or can take over."""
        num_own = job.num_computed // self._device.block_size
        wanted = self._keys.wanted(job)
        if self._device.kinds[0].window is not None:
            return list(wanted), 0
        keys = list(islice(wanted, num_own))
        is_kept, jobs_with = self._device.is_kept, self._jobs_with[0]
        for key in wanted:
            if may_take_over and len(keys) == num_own and is_kept(key):
                num_own += 1
            elif not may_copy or key not in jobs_with:
                break
            keys.append(key)
        return keys, num_own

    def _last_blocks(
        self, kind: int, keys: Sequence[bytes], length: int, may_take_over: bool, may_copy: bool
    ) -> tuple[range, int]:
        """What layers with a window get for a prefix of ``length`` blocks.

        Returns:
            the kept blocks that the job can take over, behind which it copies, and ``length``.
            Or, if some block is missing, how many blocks a shorter prefix has at most.
        """
        block_size = self._device.block_size
        seen = self._device.kinds[kind].first_seen(length * block_size, block_size)
        first_copy = length
        while may_copy and first_copy > seen and keys[first_copy - 1] in self._jobs_with[kind]:
            first_copy -= 1
        stop = seen
        while may_take_over and stop < length and self._device.is_kept(keys[stop], kind):
            stop += 1
        return range(seen, stop), length if stop >= first_copy else first_copy - 1


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
        self._hits: dict[int, PrefixHit] = {}  # by job, what it gets if it runs
        self._to_publish: list[Job] = []  # when the step is sent
        # Keys of blocks that this round's step computes, or a prefill in flight.
        self._coming: set[bytes] = set()
        for job in prefilling:
            if job.finish_reason is None and job.num_pending == 0:  # a chunk runs, others follow
                self._coming.update(self._keys.of_prefill(job))

    def find(self, job: Job, *, may_take_over: bool, may_copy: bool) -> None:
        """Find the prefix of a job that has computed nothing.

        Args:
            may_take_over: it gets the kept blocks of its first tokens.
            may_copy: it plans to copy what is missing then.
        """
        self._hits[job.number] = self._prefixes.take_over(
            job, may_take_over=may_take_over, may_copy=may_copy
        )

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
        self._coming.update(islice(self._keys.of_prefill(job), num_blocks))
        return self._prefixes.on_used(job)

    def publish_all(self) -> None:
        """The round's step was sent: publish what its jobs compute."""
        for job in self._to_publish:
            self._prefixes.publish(job)

    def _copy(self, job: Job) -> None:
        hit = self._hits[job.number]
        assert len(hit.keys) * self._device.block_size == job.num_ready, "another prefix was found"
        for kind in range(len(self._device.kinds)):
            for index in hit.to_copy(kind):
                source = self._prefixes.source(hit.keys[index], kind)
                block = range(index, index + 1)
                self.copies.from_blocks += self._device.blocks_at(source, kind, block)
                self.copies.to_blocks += self._device.blocks_at(job.number, kind, block)
                self.copies.sources.add(source)
        self.copies.num_tokens += job.num_shared
