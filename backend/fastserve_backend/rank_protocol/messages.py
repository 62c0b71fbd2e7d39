"""Typed messages between the engine and its ranks, as MessagePack.

Arrays travel as little-endian bytes, so that encoding a step costs microseconds. The only state
that a rank keeps is the KV blocks and the last step's tokens. So the engine can drop a job,
recompute it or move it to a fresh rank without telling the old one.
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
    host_share: float
    device_memory_utilization: float
    device_blocks: int | None
    swap_space_gib: float
    device_dtype: KVDType
    host_dtype: KVDType
    max_num_seqs: int
    max_num_batched_tokens: int
    start_id: str = ""
    """On several hosts: names this start of the ranks in the store where they meet."""
    eos_token_ids: tuple[int, ...] = ()
    """The tokens that end an answer. Some come from files that a rank does not read."""
    disk_swap_gib: float = 0.0
    disk_swap_dir: str | None = None

    @classmethod
    def of(
        cls, config: EngineConfig, directory: str | None = None, eos_token_ids: tuple[int, ...] = ()
    ) -> Setup:
        """
        Args:
            directory: the model's files on this host. Ranks of this host load these. Ranks of
                other hosts load the same commit: the model's name may mean newer files by the
                time they (re)start.
            eos_token_ids: a job may not choose them before it has its ``min_tokens``.
        """
        model, parallel, kv = config.model, config.parallel, config.kv_cache
        files = at_commit(model.model, directory)
        if directory and parallel.nnodes == 1:
            # In a rank's spelling: the stub's Python only knows ASCII file names.
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
            host_share=parallel.host_share,
            device_memory_utilization=kv.device_memory_utilization,
            device_blocks=kv.device_blocks,
            swap_space_gib=kv.swap_space_gib if kv.is_swapping else 0.0,
            device_dtype=kv.device_dtype,
            host_dtype=kv.host_dtype,
            max_num_seqs=config.scheduler.most_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            eos_token_ids=eos_token_ids,
            disk_swap_gib=kv.disk_swap_gib,
            disk_swap_dir=kv.disk_swap_dir,
        )


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """A rank has loaded its part of the model and can take steps."""

    num_blocks: int
    num_host_blocks: int
    block_bytes: int
    """Bytes of one block, with the rank's layers and heads, as copied between device and host."""
    block_out_s: float
    """Seconds to copy one block to the host; 0 without host blocks."""
    block_in_s: float
    """Seconds to copy it back."""
    hardware: str
    """What the latency profile depends on: processor or GPU, its share in use, kernels."""
    dtype: DType
    num_disk_blocks: int = 0
    disk_write_s: float = 0.0
    """Seconds to write one block of the host to the disk; 0 without blocks there."""
    disk_read_s: float = 0.0
    """Seconds to read it back."""
    disk_error: str | None = None
    """Why there are no blocks on the disk, although the configuration asks for them."""
    local_pids: tuple[int, ...] = ()
    """Processes of the ranks on the engine's host. The executor adds them, a rank has none."""


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """The rank cannot go on, and ends after this message."""

    reason: str
    """One line for the user."""
    user_error: bool
    """True: the model or configuration is at fault, not the program."""


class Heartbeat(msgspec.Struct, tag="heartbeat", array_like=True):
    """A thread of the rank sends this every second, so that a stopped process is noticed."""


class Sampling(msgspec.Struct, array_like=True):
    """How rows choose their token. Arrays have an entry for each of the R rows that get one."""

    temperature: bytes  # float32 [R]; 0 = greedy
    top_k: bytes  # int32 [R]; 0 = all
    top_p: bytes  # float32 [R]
    uniform: bytes  # float64 [R]: in [0, 1), the randomness of this token
    no_eos: bytes  # bool [R]: this row may not choose an end-of-sequence token
    num_logprobs: bytes  # int32 [R]: -1 = none, n = the chosen token's and the n largest
    penalties: list[Penalties]
    biases: list[LogitBias] = []
    masked_rows: bytes = b""  # int32 [m]: rows that may not choose every token
    masks: bytes = b""
    """int32 [m, ceil(vocab / 32)]: for each of these rows a bit for each token, 1 if the row may
    choose it. The lowest bit of a byte comes first."""
    min_p: bytes = b""  # float32 [R]: 0 = none; or empty: no row has one


class LogitBias(msgspec.Struct, array_like=True):
    """Numbers that are added to a row's logits."""

    row: int
    token_ids: bytes  # int32 [n], without duplicates
    values: bytes  # float32 [n]


class Penalties(msgspec.Struct, array_like=True):
    """Penalties of one row for tokens that its job already has."""

    row: int
    repetition: float
    presence: float
    frequency: float
    prompt_ids: bytes  # int32; empty if they are not penalised
    output_ids: bytes  # int32
    is_pending: bool
    """Whether the output also includes the token that the row runs, which only the ranks know."""


class PromptRows(msgspec.Struct, array_like=True):
    """Tokens of a job's prompt whose log-probabilities are wanted."""

    job: int
    """The job's place in the step's order."""
    first_row: int
    """The row, of the step's T tokens, whose logits give the first of ``token_ids``. Each later
    token has the next row."""
    token_ids: bytes  # int32 [n]
    num_top: int
    """How many of the most likely tokens of each row to return."""

    @property
    def num_rows(self) -> int:
        return len(self.token_ids) // 4


class Step(msgspec.Struct, tag="step", array_like=True):
    """One step of S jobs with T tokens. R = S - num_partial jobs get a new token.

    The order of the jobs: first those that decode, then those whose prefill ends in this step, then
    those whose prefill goes on in a later step.

    The model has layers of K kinds (`layer_kinds`). A job's table for a kind of m groups has m
    entries for each block of a group.
    """

    step_id: int
    num_decodes: int
    """So many jobs, the first ones, run one token each. The cache has all their earlier tokens."""
    num_partial: int
    """So many jobs, the last ones, run a chunk of their prefill and get no token yet."""
    token_ids: bytes  # int32 [T], job after job
    query_lens: bytes  # int32 [S]: tokens of each job in this step
    starts: bytes  # int32 [S]: position of each job's first token
    block_counts: bytes  # int32 [K, S]: entries of each job's table, for each kind of layers
    block_ids: bytes  # int32 [sum(block_counts)], kind after kind and in each job after job
    sampling: Sampling | None
    """None: choose every new token greedily, and return nothing but tokens."""
    previous_rows: bytes = b""  # int32 [num_decodes], or empty
    """Set if the engine sent this step before it knew the last step's tokens. For each job that
    decodes: the row of the last step whose token it runs, or -1 if ``token_ids`` has the token.
    Empty: ``token_ids`` has all tokens."""
    first_blocks: bytes = b""  # int32 [K, S], or empty
    """With which block of a group each table begins. Empty: with block 0."""
    are_long: bytes = b""  # bool [S], or empty
    """Whether each job is longer than the model's ``rotary_switch``. Empty: none is."""
    prompt_rows: list[PromptRows] = []
    """None of these jobs decodes."""

    @classmethod
    def of(
        cls,
        step_id: int,
        jobs: Sequence[tuple[int, Sequence[int], *tuple[Sequence[int], ...]]],
        *,
        num_partial: int = 0,
        first_blocks: Sequence[Sequence[int]] = (),
    ) -> Step:
        """A greedy step that knows all its tokens.

        Args:
            jobs: (position of the first token, tokens, a block table for each kind of layers) of
                each, in the step's order. A job decodes if it runs a single token and gets one.
            first_blocks: for each kind of layers, with which block each job's table begins. Empty:
                with block 0.
        """
        starts, tokens, *kinds = zip(*jobs, strict=True)
        tables = list(chain.from_iterable(kinds))
        return cls(
            step_id=step_id,
            num_decodes=sum(len(ids) == 1 for ids in tokens[: len(jobs) - num_partial]),
            num_partial=num_partial,
            token_ids=_ints(chain.from_iterable(tokens)),
            query_lens=_ints(map(len, tokens)),
            starts=_ints(starts),
            block_counts=_ints(map(len, tables)),
            block_ids=_ints(chain.from_iterable(tables)),
            sampling=None,
            first_blocks=_ints(chain.from_iterable(first_blocks)),
        )


class StageDone(msgspec.Struct, tag="stage", array_like=True):
    """A stage, not the last, has computed its part of a step and can take the next step."""

    step_id: int
    busy_s: float
    """Seconds until its activations were on their way, counted like ``StepResult.compute_s``."""


NO_TOKEN = -1


class StepResult(msgspec.Struct, tag="result", array_like=True):
    step_id: int
    token_ids: bytes  # int32 [R]; NO_TOKEN where the logits are NaN
    compute_s: float
    """Seconds of computing until the tokens are ready. Counting starts when the inputs are ready,
    the activations have arrived and the device has finished the step before. Steps never overlap,
    so their sum cannot exceed wall time."""
    logprobs: bytes  # float32 [R]; empty if no job asks for them
    top_logprobs: list[TopLogprobs]
    waited_s: float = 0.0
    """Seconds that the step waited for stages that still ran the step before. Only the executor
    sets this."""
    prompt_scores: list[PromptScores] = []
    """One for each of ``Step.prompt_rows``."""


class TopLogprobs(msgspec.Struct, array_like=True):
    """The most likely tokens of a row that asks for them."""

    row: int
    token_ids: bytes  # int32 [n]
    logprobs: bytes  # float32 [n]


class PromptScores(msgspec.Struct, array_like=True):
    """Log-probabilities of the n tokens of a ``PromptRows``."""

    logprobs: bytes  # float32 [n]
    ranks: bytes  # int32 [n]: 1 if no token is likelier
    top_ids: bytes  # int32 [n, num_top]: the most likely tokens, the likeliest first
    top_logprobs: bytes  # float32 [n, num_top]


class CopyBlocks(msgspec.Struct, tag="copy", array_like=True):
    """Copy KV blocks between device and host while steps run.

    Copies in one direction are made in the order of their messages.
    """

    transfer_id: int
    is_out: bool
    """Whether the copy goes from the device to the host."""
    device_blocks: bytes  # int32 [n]
    host_blocks: bytes  # int32 [n]
    num_last_tokens: int
    """Tokens in each of the last ``num_last`` blocks; the others are full."""
    num_last: int = 1


class DiskCopy(msgspec.Struct, tag="disk", array_like=True):
    """Copy KV blocks between the host and the rank's file while steps and other copies run.

    Copies in one direction are made in the order of their messages. ``CopyResult`` answers.
    """

    transfer_id: int
    is_write: bool
    """Whether the copy goes from the host to the file."""
    host_blocks: bytes  # int32 [n]
    slots: bytes  # int32 [n]: places of one block each in the file


class CopyResult(msgspec.Struct, tag="copied", array_like=True):
    """A copy has ended: its blocks may be read, written and reused."""

    transfer_id: int
    seconds: float
    """How long the copy itself took, without waiting for other copies."""
    error: str | None
    """Why the blocks were not copied; None if they were."""


class Stop(msgspec.Struct, tag="stop", array_like=True):
    """The rank finishes its steps and ends."""


ToRank = Setup | Step | CopyBlocks | DiskCopy | Stop
FromRank = Hello | Ready | Failed | Heartbeat | StageDone | StepResult | CopyResult

encoder = msgspec.msgpack.Encoder()
to_rank_decoder = msgspec.msgpack.Decoder(ToRank)
from_rank_decoder = msgspec.msgpack.Decoder(FromRank)


def _ints(values: Iterable[int]) -> bytes:
    return array("i", values).tobytes()
