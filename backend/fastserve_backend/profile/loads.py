"""The iterations to measure: a grid for the fit, and random mixes for the fit and its test."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.config import EngineConfig
from fastserve_backend.rank_protocol.layer_kinds import ONE_GROUP, BlockNeeds, LayerKind

Mix = tuple[tuple[int, int, bool], ...]
"""(tokens in the cache, tokens to run, whether a token is sampled) of each job of an iteration."""

# Brief grid: the shape of the curves, measured in a few seconds.
_BRIEF_PROMPTS = (2, 8, 32, 64, 128, 256, 512, 1024)
_BRIEF_BATCHES = (1, 4, 16, 64)
_BRIEF_CONTEXTS = (16, 512)
_BRIEF_CHUNKS = ((256, 128), (512, 16))
# Full grid: denser, and up to the limits.
_FULL_PROMPTS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_FULL_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
_FULL_CONTEXTS = (16, 256, 1024)
_FULL_CHUNKS = ((64, 8), (1024, 8), (512, 32), (1024, 64), (256, 128), (1536, 128))
# Short prompts are also measured several at once: more jobs get a token from as many tokens.
_PROMPTS_AT_ONCE = 4
_LONGEST_PROMPT_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of all iterations."""

    max_seqs: int
    max_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int
    kinds: tuple[LayerKind, ...] = ONE_GROUP
    """Of the model's layers."""

    @classmethod
    def of(cls, config: EngineConfig, model: ModelConfig, num_blocks: int) -> Limits:
        """The limits of an engine whose ranks have ``num_blocks`` blocks."""
        return cls(
            max_seqs=config.scheduler.most_seqs,
            max_batched_tokens=config.scheduler.max_num_batched_tokens,
            max_model_len=model.max_model_len,
            num_blocks=num_blocks,
            block_size=config.kv_cache.block_size,
            kinds=model.layer_groups.kinds,
        )

    @property
    def needs(self) -> BlockNeeds:
        """Counts the blocks of jobs."""
        return BlockNeeds(self.block_size, self.kinds, self.max_batched_tokens)

    @property
    def max_job_tokens(self) -> int:
        """Most tokens of one job, cached and new ones together."""
        return min(self.max_model_len, self.needs.longest_job(self.num_blocks))

    @property
    def max_prefill_tokens(self) -> int:
        return min(self.max_job_tokens, self.max_batched_tokens)

    def hold(self, mix: Mix) -> bool:
        """Whether an engine with these limits can run the iteration."""
        needs = self.needs
        blocks = sum(needs.for_step(start, start + count) for start, count, _ in mix)
        return (
            0 < len(mix) <= self.max_seqs
            and sum(count for _, count, _ in mix) <= self.max_batched_tokens
            and all(start + count <= self.max_job_tokens for start, count, _ in mix)
            and blocks <= self.num_blocks
        )


def brief_grid(limits: Limits) -> list[Mix]:
    """A few prefills, decodes and chunks of prefills."""
    return _grid(limits, _BRIEF_PROMPTS, _BRIEF_BATCHES, _BRIEF_CONTEXTS, _BRIEF_CHUNKS)


def full_grid(limits: Limits) -> list[Mix]:
    """Many prefills, decodes and chunks of prefills, up to the limits."""
    return _grid(limits, _FULL_PROMPTS, _FULL_BATCHES, _FULL_CONTEXTS, _FULL_CHUNKS)


def random_mixes(limits: Limits, count: int, rng: random.Random) -> list[Mix]:
    """Random mixes of decodes, prefills and chunks, such as a busy engine may have."""
    return [_random_mix(limits, rng) for _ in range(count)]


def _grid(
    limits: Limits,
    prompts: Iterable[int],
    batches: Iterable[int],
    contexts: Iterable[int],
    chunks: Iterable[tuple[int, int]],
) -> list[Mix]:
    longest = min(limits.max_job_tokens, limits.max_batched_tokens)
    mixes: list[Mix] = [((0, 1, True),)]
    for prompt in prompts:
        length = min(prompt, longest)
        mixes.append(((0, length, True),))
        if length <= _LONGEST_PROMPT_AT_ONCE:
            mixes.append(((0, length, True),) * _PROMPTS_AT_ONCE)
    for batch in batches:
        for context in contexts:
            start = min(context, limits.max_job_tokens - 1)
            mixes.append(((start, 1, True),) * min(batch, limits.max_seqs))
    for index, (start, count) in enumerate(chunks):
        is_last = index % 2 == 0
        mixes.append(((start, count, is_last),))
    return [mix for mix in dict.fromkeys(mixes) if limits.hold(mix)]


def _random_mix(limits: Limits, rng: random.Random) -> Mix:
    """All sizes are distributed evenly over their orders of magnitude: most real ones are short."""
    budget = _log_uniform(rng, 1, limits.max_batched_tokens)
    mix: list[tuple[int, int, bool]] = []
    num_decodes = min(rng.randint(0, limits.max_seqs), budget)
    for _ in range(num_decodes):
        mix.append((_log_uniform(rng, 1, limits.max_job_tokens) - 1, 1, True))
    budget -= num_decodes
    while budget > 1 and len(mix) < limits.max_seqs:
        count = _log_uniform(rng, 2, min(budget, limits.max_job_tokens))
        is_chunk = count < limits.max_job_tokens and rng.random() < 0.5
        start = _log_uniform(rng, 1, limits.max_job_tokens - count) if is_chunk else 0
        mix.append((start, count, rng.random() < 0.75))
        budget -= count
        if rng.random() < 0.4:
            break
    while not limits.hold(tuple(mix)) and len(mix) > 1:
        mix.pop(0)
    return tuple(mix) if mix else ((0, 1, True),)


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))
