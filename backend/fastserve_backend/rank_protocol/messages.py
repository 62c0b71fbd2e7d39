"""Typed messages between the engine and its ranks, as MessagePack.

Arrays travel as little-endian bytes, so that encoding a step costs microseconds. A rank keeps no
state of a job but its KV blocks, and of all steps only the last one's tokens, so a job can be
dropped, recomputed or moved to a fresh rank without a word to the old one.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Literal

import msgspec

from fastserve_backend.checkpoints.hub import at_commit
from fastserve_backend.checkpoints.model_config import DType, KVDType, Quantization

if TYPE_CHECKING:  # pydantic takes a rank a quarter of a second to import
    from fastserve_backend.config import EngineConfig


class Hello(msgspec.Struct, tag="hello", array_like=True):
    """A rank's first message: it runs and wants its ``Setup``."""

    pid: int
    host: str


class Setup(msgspec.Struct, tag="setup", array_like=True):
    """What a rank needs to build its part of the model."""

    model: str
    load_format: Literal["auto", "dummy"]
    dtype: DType | Literal["auto"]
    quantization: Quantization | None
    max_model_len: int | None
    device: Literal["auto", "cpu", "cuda"]
    tensor_parallel_size: int
    pipeline_parallel_size: int
    block_size: int
    device_memory_utilization: float
    device_blocks: int | None
    swap_space_gib: float
    device_dtype: KVDType
    host_dtype: KVDType
    max_num_seqs: int
    max_num_batched_tokens: int
    start_id: str = ""
    """On several hosts: names this start of the ranks where they meet."""
    eos_token_ids: tuple[int, ...] = ()
    """End an answer, by files that a rank does not read, such as the tokenizer's."""

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        directory: str | None = None,
        eos_token_ids: tuple[int, ...] = (),
    ) -> Setup:
        """
        Args:
            directory: where the model's files are on this host. Ranks there load those, ranks of
                other hosts their commit: a name may mean others by the time that they are
                (re)started.
            eos_token_ids: a job may not choose them before it has its ``min_tokens``.
        """
        model, parallel, kv = config.model, config.parallel, config.kv_cache
        files = at_commit(model.model, directory)
        if directory and parallel.nnodes == 1:
            # As a rank spells it: the stub takes file names for ASCII.
            files = os.fsencode(directory).decode("utf-8", "surrogateescape")
        return cls(
            model=files,
            load_format=model.load_format,
            dtype=model.dtype,
            quantization=model.quantization,
            max_model_len=model.max_model_len,
            device=model.device,
            tensor_parallel_size=parallel.tensor_parallel_size,
            pipeline_parallel_size=parallel.pipeline_parallel_size,
            block_size=kv.block_size,
            device_memory_utilization=kv.device_memory_utilization,
            device_blocks=kv.device_blocks,
            swap_space_gib=kv.swap_space_gib if kv.is_swapping else 0.0,
            device_dtype=kv.device_dtype,
            host_dtype=kv.host_dtype,
            max_num_seqs=config.scheduler.most_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            eos_token_ids=eos_token_ids,
        )


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The model is loaded."""

    num_blocks: int
    num_host_blocks: int
    block_bytes: int
    """Of one block of the rank's layers and heads, as it crosses the link to the host."""
    block_out_s: float
    """What copying one block to the host takes, and back; 0 without host blocks."""
    block_in_s: float
    hardware: str
    """Processor or GPU, its share in use, kernels: what the latency profile depends on."""
    dtype: DType


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """The rank cannot go on; it ends after this."""

    reason: str
    """One line for the user."""
    user_error: bool
    """True: the model or configuration is at fault, not the program."""


class Heartbeat(msgspec.Struct, tag="heartbeat", array_like=True):
    """Sent every second from a thread of its own, so that a stopped process is noticed."""


class Sampling(msgspec.Struct, array_like=True):
    """How the rows that sample choose their token. One entry a sampling row, in order."""

    temperature: bytes  # float32 [R]; 0 = greedy
    top_k: bytes  # int32 [R]; 0 = all
    top_p: bytes  # float32 [R]
    uniform: bytes  # float64 [R]: in [0, 1), the randomness of this token
    no_eos: bytes  # bool [R]: end-of-sequence tokens may not be chosen
    num_logprobs: bytes  # int32 [R]: -1 = none, n = the token's own and the n most likely
    penalties: list[Penalties]
    biases: list[LogitBias] = []
    masked_rows: bytes = b""  # int32 [m]: rows that may not choose every token
    masks: bytes = b""
    """Of each of these a bit for each token that it may choose, the lowest of each byte first, in
    whole words of 32 bits: int32 [m, ceil(vocab / 32)]."""


class LogitBias(msgspec.Struct, array_like=True):
    """Added to a row's logits."""

    row: int
    token_ids: bytes  # int32 [n], no two the same
    values: bytes  # float32 [n]


class Penalties(msgspec.Struct, array_like=True):
    row: int
    repetition: float
    presence: float
    frequency: float
    prompt_ids: bytes  # int32; empty if nothing is taken off for them
    output_ids: bytes  # int32
    is_pending: bool
    """The token that the row runs belongs to the output too, and only the ranks know it yet."""


class Step(msgspec.Struct, tag="step", array_like=True):
    """One iteration. S jobs, T tokens in all; R = S - num_partial jobs get a new token.

    The order of jobs: those in decode phase, those whose prefill ends here, those whose prefill
    goes on in a later step.
    """

    step_id: int
    num_decodes: int
    """The first so many jobs run one token each, with all earlier ones in the cache."""
    num_partial: int
    """The last so many jobs run a chunk of their prefill and get no token yet."""
    token_ids: bytes  # int32 [T], job after job
    query_lens: bytes  # int32 [S]: tokens of each job in this step
    starts: bytes  # int32 [S]: position of each job's first token
    block_counts: bytes  # int32 [S]
    block_ids: bytes  # int32 [sum(block_counts)]
    sampling: Sampling | None
    """None: every new token is chosen greedily, nothing else is asked."""
    previous_rows: bytes = b""  # int32 [num_decodes], or empty
    """Where the step was sent before the tokens of the one before it were known: for each job in
    the decode phase the row of that step's tokens that it runs, or -1 if ``token_ids`` has its
    token. Empty: ``token_ids`` has all."""
    copy_from: bytes = b""  # int32 [n]
    """Blocks to copy on the device, before anything else is done."""
    copy_to: bytes = b""  # int32 [n]: blocks of the step's jobs, none of which is in copy_from

    @classmethod
    def of(
        cls,
        step_id: int,
        jobs: Sequence[tuple[int, Sequence[int], Sequence[int]]],
        *,
        num_partial: int = 0,
    ) -> Step:
        """A greedy step that knows all its tokens. ``jobs``: (position of the first token, tokens,
        blocks) of each, in the step's order; one that runs a single token and gets one decodes."""
        starts, tokens, blocks = zip(*jobs, strict=True)
        return cls(
            step_id=step_id,
            num_decodes=sum(len(ids) == 1 for ids in tokens[: len(jobs) - num_partial]),
            num_partial=num_partial,
            token_ids=_ints(chain.from_iterable(tokens)),
            query_lens=_ints(map(len, tokens)),
            starts=_ints(starts),
            block_counts=_ints(map(len, blocks)),
            block_ids=_ints(chain.from_iterable(blocks)),
            sampling=None,
        )


class StageDone(msgspec.Struct, tag="stage", array_like=True):
    """A stage but the last has computed its part of a step and can take the next."""

    step_id: int
    busy_s: float
    """Until its activations were on their way; from when ``StepResult.compute_s`` counts too."""


NO_TOKEN = -1


class StepResult(msgspec.Struct, tag="result", array_like=True):
    step_id: int
    token_ids: bytes  # int32 [R]; NO_TOKEN where the logits are NaN
    compute_s: float
    """To its tokens, from when the rank had made its inputs, its activations had arrived and the
    device had ended the step before: of all steps together no more than the time that passed."""
    logprobs: bytes  # float32 [R], empty if no job asked
    top_logprobs: list[TopLogprobs]
    waited_s: float = 0.0
    """Between stages, for those that still ran the step before. Known to the executor alone."""


class TopLogprobs(msgspec.Struct, array_like=True):
    row: int
    token_ids: bytes  # int32 [n]
    logprobs: bytes  # float32 [n]


class CopyBlocks(msgspec.Struct, tag="copy", array_like=True):
    """Copy KV blocks between device and host, while steps run. Copies in one direction are made in
    the order of the messages."""

    transfer_id: int
    is_out: bool
    """From the device to the host."""
    device_blocks: bytes  # int32 [n]
    host_blocks: bytes  # int32 [n]
    num_last_tokens: int
    """Tokens in the last of the blocks; the others are full."""


class CopyResult(msgspec.Struct, tag="copied", array_like=True):
    """The copy has ended: its blocks may be read, written and reused."""

    transfer_id: int
    seconds: float
    """That the copy itself took, without waiting for others."""
    error: str | None
    """Why the blocks were not copied."""


class Stop(msgspec.Struct, tag="stop", array_like=True):
    """End in order."""


ToRank = Setup | Step | CopyBlocks | Stop
FromRank = Hello | Ready | Failed | Heartbeat | StageDone | StepResult | CopyResult

encoder = msgspec.msgpack.Encoder()
to_rank_decoder = msgspec.msgpack.Decoder(ToRank)
from_rank_decoder = msgspec.msgpack.Decoder(FromRank)


def _ints(values: Iterable[int]) -> bytes:
    return array("i", values).tobytes()
