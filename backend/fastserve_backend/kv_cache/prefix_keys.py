"""Keys that identify the content of KV blocks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from fastserve_backend.config_sections import KVCacheSection
from fastserve_backend.job import FinishReason, Job

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

    def wanted(self, job: Job) -> Sequence[bytes]:
        """Keys of the blocks that the job may get from others: none if it needs to compute its
        whole prompt, else those ``of_prefill``."""
        return () if job.needs_whole_prompt else self.of_prefill(job)

    def of_prefill(self, job: Job) -> Sequence[bytes]:
        """Keys of the blocks that the job has before its next token. Its last token is never among
        them: the job has to compute at least one token to get its next one.

        Only for jobs that have not computed their whole prompt yet, or begin anew."""
        is_long = self._rotary_switch is not None and job.num_tokens > self._rotary_switch
        if is_long and job.number not in self._long:
            self.forget(job)
            self._long.add(job.number)
        return self._of(job, job.num_tokens - 1)

    def held(self, job: Job) -> Sequence[bytes]:
        """Keys of the blocks that the job has computed, as far as others may use them."""
        if job.finish_reason is FinishReason.ERROR or (self._swaps_are_lossy and job.num_swaps):
            return ()
        # A step sent ahead may have computed a token behind a stop word. The job has no such token.
        num_tokens = len(job.prompt_ids) + len(job.output_ids)
        return self._of(job, min(job.num_computed, num_tokens))

    def forget(self, job: Job) -> None:
        self._keys.pop(job.number, None)
        self._long.discard(job.number)

    def _of(self, job: Job, num_tokens: int) -> Sequence[bytes]:
        num_blocks = num_tokens // self.block_size
        if not self.is_on or num_blocks == 0:
            return ()
        keys = self._keys.setdefault(job.number, [])
        for block in range(len(keys), num_blocks):
            before = keys[-1] if keys else self._root(job)
            tokens = _tokens(job, block * self.block_size, self.block_size)
            keys.append(blake2b(before + tokens.tobytes(), digest_size=_KEY_BYTES).digest())
        return keys[:num_blocks]

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
