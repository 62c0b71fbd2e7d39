"""From a ``Step`` message to the tensors that the model's forward pass reads.

`StepLayout` holds the step's arrays on the host. `CPUInputs` and `WorkListInputs` bring them to the
device as `StepTensors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from fastserve_kernels.common_beginnings import common_beginnings
from fastserve_kernels.gpu import work_lists
from torch import Tensor

from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.models.attention import AttentionBatch, CPUBatch, WorkListBatch
from fastserve_backend.models.loader import torch_dtype
from fastserve_backend.rank_protocol.layer_kinds import ONE_GROUP, LayerKind
from fastserve_backend.rank_protocol.messages import Step
from fastserve_backend.worker.graph_sizes import (
    GraphSize,
    decode_sizes,
    mixed_sizes,
    most_host_bound_tokens,
)
from fastserve_backend.worker.staging import Places, Staging

Array = npt.NDArray[Any]

# Those of a step without prompts.
_NO_CONTEXTS = np.zeros(0, dtype=np.int32)
_NO_STARTS = _NO_TILES = np.zeros(1, dtype=np.int32)


@dataclass(frozen=True)
class StepLimits:
    """Bounds that every step keeps."""

    max_jobs: int
    max_tokens: int
    max_model_len: int

    def max_blocks(self, block_size: int) -> int:
        """Blocks of the longest job."""
        return -(-self.max_model_len // block_size)


@dataclass(frozen=True)
class StepLayout:
    """The arrays of a step of S jobs and T tokens, job after job. Jobs that decode come first.

    token_ids, positions: int64 [T].
        A negative token id stands for a token that the step before chose: it is that token's index
        from the end.
    slots: int64 [G, T], for each group of layers where a token's key and value go: block · block
        size + offset, -1 for padding.
    query_starts: int32 [S + 1], the first row of each job, then T.
    context_lens: int32 [S], a job's tokens in the cache after this step.
    block_tables: int32 [N], the blocks of all groups and jobs.
    table_starts: int32 [G, S], where each job's blocks begin in block_tables. If a table begins
        with a later block than block 0: where it would begin with that, perhaps below 0.
    sampled: int64 [R], the last row of each job that gets a token.
    """

    token_ids: Array
    positions: Array
    slots: Array
    query_starts: Array
    context_lens: Array
    block_tables: Array
    table_starts: Array
    sampled: Array
    num_decodes: int

    @classmethod
    def of(
        cls,
        step: Step,
        block_size: int,
        num_previous: int = 0,
        kinds: Sequence[LayerKind] = ONE_GROUP,
    ) -> StepLayout:
        """
        Args:
            num_previous: how many tokens the step before chose.
            kinds: of the model's layers.

        Raises:
            IndexError: the step takes a token that the step before did not choose.
        """
        query_lens = np.frombuffer(step.query_lens, dtype=np.int32)
        starts = np.frombuffer(step.starts, dtype=np.int32)
        block_tables, table_starts = _tables(step, kinds)
        query_starts = np.zeros(len(query_lens) + 1, dtype=np.int32)
        np.cumsum(query_lens, dtype=np.int32, out=query_starts[1:])
        positions, table_starts_of_tokens = starts.astype(np.int64), table_starts
        if query_starts[-1] > len(query_lens):  # some jobs run several tokens
            positions = np.repeat(positions - query_starts[:-1], query_lens)
            positions += np.arange(len(positions))
            table_starts_of_tokens = np.repeat(table_starts, query_lens, axis=1)
        entries, offsets = np.divmod(positions, block_size)
        blocks = block_tables[table_starts_of_tokens + entries].astype(np.int64)
        slots = blocks * block_size + offsets
        if step.are_long:
            are_long = np.frombuffer(step.are_long, dtype=np.bool_)
            positions = np.where(np.repeat(are_long, query_lens), -1 - positions, positions)
        return cls(
            token_ids=_token_ids(step, num_previous),
            positions=positions,
            slots=slots,
            query_starts=query_starts,
            context_lens=starts + query_lens,
            block_tables=block_tables,
            table_starts=table_starts,
            sampled=query_starts[1 : len(starts) - step.num_partial + 1].astype(np.int64) - 1,
            num_decodes=step.num_decodes,
        )

    @classmethod
    def empty(cls, num_groups: int) -> StepLayout:
        """A step without jobs."""
        by_token, by_job = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)
        slots, starts = np.zeros((num_groups, 0), np.int64), np.zeros((num_groups, 0), np.int32)
        first = np.zeros(1, dtype=np.int32)
        return cls(by_token, by_token, slots, first, by_job, by_job, starts, by_token, 0)

    @property
    def num_jobs(self) -> int:
        return len(self.context_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def only_decodes(self) -> bool:
        return self.num_decodes == self.num_jobs

    @property
    def prompt_lens(self) -> Array:
        """int32 [S]: a job's tokens in this step, but 0 for decodes."""
        query_lens = np.diff(self.query_starts)
        query_lens[: self.num_decodes] = 0
        return query_lens

    def padded(self, num_tokens: int, num_jobs: int) -> StepLayout:
        """The same step with tokens and jobs added that do nothing, up to these numbers.

        All arrays but the block tables then have the same shapes for equal numbers.
        """
        return StepLayout(
            token_ids=_padded(self.token_ids, num_tokens, 0),
            positions=_padded(self.positions, num_tokens, 0),
            slots=_padded(self.slots, num_tokens, -1),
            query_starts=_padded(self.query_starts, num_jobs + 1, self.num_tokens),
            context_lens=_padded(self.context_lens, num_jobs, 0),
            block_tables=self.block_tables,
            table_starts=_padded(self.table_starts, num_jobs, 0),
            sampled=_padded(self.sampled, num_jobs, 0),
            num_decodes=self.num_decodes,
        )


def _token_ids(step: Step, num_previous: int) -> Array:
    token_ids = np.frombuffer(step.token_ids, dtype=np.int32).astype(np.int64)
    if step.previous_rows:
        rows = np.frombuffer(step.previous_rows, dtype=np.int32)
        if rows.max() >= num_previous:
            raise IndexError(
                f"step {step.step_id} takes token {rows.max()} of the step before it, which chose "
                f"{num_previous}"
            )
        decoded = token_ids[: step.num_decodes]
        decoded[:] = np.where(rows >= 0, rows - num_previous, decoded)
    return token_ids


def _tables(step: Step, kinds: Sequence[LayerKind]) -> tuple[Array, Array]:
    """`StepLayout.block_tables` and `StepLayout.table_starts`."""
    counts = np.frombuffer(step.block_counts, dtype=np.int32)
    block_ids = np.frombuffer(step.block_ids, dtype=np.int32)
    if not step.first_blocks:
        return block_ids, (np.cumsum(counts, dtype=np.int32) - counts)[np.newaxis]
    counts = counts.reshape(len(kinds), -1)
    firsts = np.frombuffer(step.first_blocks, dtype=np.int32).reshape(counts.shape)
    tables, starts, begin = [], [], 0
    for kind, counts_of_kind, first_blocks in zip(kinds, counts, firsts, strict=True):
        # A table has the blocks of all groups side by side: divide them into a table for each.
        lengths = counts_of_kind // kind.num_groups
        length = int(lengths.sum())
        end = begin + length * kind.num_groups
        tables.append(block_ids[begin:end].reshape(length, kind.num_groups).T.ravel())
        of_first_group = begin + np.cumsum(lengths, dtype=np.int32) - lengths - first_blocks
        starts += [of_first_group + group * length for group in range(kind.num_groups)]
        begin = end
    return np.concatenate(tables), np.stack(starts)


def _padded(array: Array, size: int, value: int) -> Array:
    padded = np.full((*array.shape[:-1], size), value, dtype=array.dtype)
    padded[..., : array.shape[-1]] = array
    return padded


@dataclass(frozen=True)
class StepTensors:
    """A step as the forward pass reads it, on the device.

    num_jobs, num_decodes, num_tokens, num_sampled: without padding.
    size: that to which the tensors are padded; None: they are not.
    token_ids, positions: int64 [T], T including padding.
    sampled: int64 [R], the rows that get a token; without padding.
    """

    num_jobs: int
    num_decodes: int
    num_tokens: int
    num_sampled: int
    size: GraphSize | None
    token_ids: Tensor
    positions: Tensor
    sampled: Tensor
    batch: AttentionBatch


class StepInputs(Protocol):
    def prepare(self, step: Step, num_previous: int) -> StepTensors:
        """The step's tensors; valid until the next call.

        Args:
            num_previous: how many tokens the step before chose.

        Raises:
            IndexError: the step takes a token that the step before did not choose.
        """
        ...


class CPUInputs:
    """Inputs of a CPU, which reads the host's arrays where they are."""

    def __init__(self, block_size: int, kinds: Sequence[LayerKind] = ONE_GROUP) -> None:
        self._block_size = block_size
        self._kinds = kinds
        self._windows = [kind.window for kind in kinds for _ in range(kind.num_groups)]

    def prepare(self, step: Step, num_previous: int) -> StepTensors:
        layout = StepLayout.of(step, self._block_size, num_previous, self._kinds)
        n = layout.num_decodes
        # A copy, because torch warns about read-only arrays.
        block_tables = torch.from_numpy(layout.block_tables.copy())
        context_lens = torch.from_numpy(layout.context_lens)
        query_starts = torch.from_numpy(layout.query_starts[n:] - n)
        groups = [
            CPUBatch(
                num_decodes=n,
                slots=torch.from_numpy(slots),
                block_tables=block_tables,
                table_starts=torch.from_numpy(table_starts),
                context_lens=context_lens,
                query_starts=query_starts,
                beginnings=common_beginnings(
                    layout.block_tables,
                    table_starts[:n],
                    layout.context_lens[:n],
                    self._block_size,
                    window=window,
                ),
            )
            for slots, table_starts, window in zip(
                layout.slots, layout.table_starts, self._windows, strict=True
            )
        ]
        return StepTensors(
            num_jobs=layout.num_jobs,
            num_decodes=n,
            num_tokens=layout.num_tokens,
            num_sampled=len(layout.sampled),
            size=None,
            token_ids=torch.from_numpy(layout.token_ids),
            positions=torch.from_numpy(layout.positions),
            sampled=torch.from_numpy(layout.sampled),
            batch=AttentionBatch(groups),
        )


class WorkListInputs:
    """Inputs of the GPU's attention kernels: work lists beside the arrays, all in one copy.

    Where there is a CUDA graph for a step, it is padded to the graph's size.

    Args:
        kv: the rank's cache.
        tensor_size: ranks that share each layer.
    """

    def __init__(
        self, kv: Tensor, config: ModelConfig, limits: StepLimits, tensor_size: int = 1
    ) -> None:
        # These modules need Triton, which only a GPU needs.
        from fastserve_kernels.gpu.paged_decode import decode_scratch
        from fastserve_kernels.gpu.paged_prefill import query_tile

        heads, head_dim = config.num_heads // tensor_size, config.head_dim
        num_blocks, block_size = len(kv), kv.shape[4]
        self._block_size = block_size
        self._kinds = kinds = config.layer_groups.kinds
        self._kind_of_group = [
            index for index, kind in enumerate(kinds) for _ in range(kind.num_groups)
        ]
        self.num_groups = len(self._kind_of_group)
        # Each block belongs to one job and group, so the jobs' tables are no longer than the cache.
        # But the largest step is tried on a cache of one block.
        most_blocks = max(num_blocks, limits.max_blocks(block_size))
        self._most_tables = np.zeros(most_blocks, dtype=np.int32)
        self._splits_a_job = [_most_splits(limits.max_model_len, kind.window) for kind in kinds]
        self._splits_in_cache = int(work_lists.num_splits(num_blocks * block_size))
        self._tile = query_tile(head_dim, torch_dtype(config), kv.device)
        self._decode_sizes = decode_sizes(limits.max_jobs)
        most_tokens = most_host_bound_tokens(
            config.num_active_layer_parameters // tensor_size, config.linear_element_bytes
        )
        self._mixed_sizes = mixed_sizes(min(most_tokens, limits.max_tokens), limits.max_jobs)
        capacity = max(self._capacities(limits.max_jobs))
        self._scratch = decode_scratch(capacity, heads, head_dim, kv.device)
        self._staging = Staging(self._most_bytes(limits), kv.device)
        self._padded_places: dict[GraphSize, Places] = {}

    @property
    def sizes(self) -> list[GraphSize]:
        """All sizes to which steps are padded."""
        return [*self._decode_sizes, *self._mixed_sizes]

    def prepare(self, step: Step, num_previous: int) -> StepTensors:
        layout = StepLayout.of(step, self._block_size, num_previous, self._kinds)
        size = self._size_for(layout)
        return self.bring(layout) if size is None else self.bring_padded(layout, size)

    def bring(self, layout: StepLayout) -> StepTensors:
        """The tensors of any step, without padding."""
        decode_contexts = layout.context_lens[: layout.num_decodes]
        capacities = [
            int(work_lists.num_splits(decode_contexts, kind.window).sum()) for kind in self._kinds
        ]
        num_tiles = int(work_lists.num_tiles(layout.prompt_lens, self._tile).sum())
        arrays = self._arrays(layout, decode_contexts, capacities, num_tiles)
        return self._tensors(layout, arrays, self._staging.places(arrays), None)

    def bring_padded(self, layout: StepLayout, size: GraphSize) -> StepTensors:
        """The tensors of a step, padded. Shapes and addresses are the same for equal sizes, except
        that ``sampled`` has its own length.

        A size must have room for the step's tokens, jobs and prompts.
        """
        padded = layout.padded(size.num_tokens, size.num_jobs)
        decode_contexts = _padded(layout.context_lens[: layout.num_decodes], size.num_jobs, 0)
        capacities = self._capacities(size.num_jobs)
        num_tiles = size.num_tokens // self._tile + size.num_prompts if size.num_prompts else 0
        arrays = self._arrays(padded, decode_contexts, capacities, num_tiles)
        if size not in self._padded_places:
            places = self._staging.places([*arrays[:-1], self._most_tables])
            self._padded_places[size] = places
        return self._tensors(layout, arrays, self._padded_places[size], size)

    def _size_for(self, layout: StepLayout) -> GraphSize | None:
        """The smallest size that has room for the step. None if a graph would not pay."""
        if layout.only_decodes:
            most = self._decode_sizes[-1].num_jobs
            assert layout.num_jobs <= most, f"a step of {layout.num_jobs} jobs, but {most} at most"
            return next(size for size in self._decode_sizes if size.num_jobs >= layout.num_jobs)
        num_prompts = layout.num_jobs - layout.num_decodes
        for size in self._mixed_sizes:
            if (
                layout.num_tokens <= size.num_tokens
                and layout.num_jobs <= size.num_jobs
                and num_prompts <= size.num_prompts
            ):
                return size
        return None

    def _arrays(
        self,
        layout: StepLayout,
        decode_contexts: Array,
        decode_capacities: Sequence[int],
        num_tiles: int,
    ) -> list[Array]:
        """In the order that `Staging` needs: block tables last, because their length varies."""
        windows = [kind.window for kind in self._kinds]
        decode_works = [
            work_lists.decode_work(decode_contexts, capacity, window)
            for capacity, window in zip(decode_capacities, windows, strict=True)
        ]
        # Decodes alone do not read what belongs to prompts, and every microsecond counts there.
        contexts, starts = _NO_CONTEXTS, _NO_STARTS
        prefill_works = [_NO_TILES] * len(windows)
        if num_tiles:
            contexts, starts = layout.context_lens, layout.query_starts
            prefill_works = [
                work_lists.prefill_work(layout.prompt_lens, self._tile, contexts, window, num_tiles)
                for window in windows
            ]
        return [
            layout.token_ids,
            layout.positions,
            layout.sampled,
            layout.slots,
            layout.table_starts,
            decode_contexts,
            contexts,
            starts,
            *decode_works,
            *prefill_works,
            layout.block_tables,
        ]

    def _tensors(
        self, layout: StepLayout, arrays: list[Array], places: Places, size: GraphSize | None
    ) -> StepTensors:
        token_ids, positions, sampled, *of_batch = self._staging.bring(arrays, places)
        slots, starts, decode_contexts, context_lens, query_starts, *of_kinds, tables = of_batch
        decode_works, prefill_works = of_kinds[: len(self._kinds)], of_kinds[len(self._kinds) :]
        groups = [
            WorkListBatch(
                slots=slots[group],
                block_tables=tables,
                table_starts=starts[group],
                decode_contexts=decode_contexts,
                decode_work=decode_works[kind],
                decode_scratch=self._scratch,
                context_lens=context_lens,
                query_starts=query_starts,
                prefill_work=prefill_works[kind],
            )
            for group, kind in enumerate(self._kind_of_group)
        ]
        num_sampled = len(layout.sampled)
        return StepTensors(
            num_jobs=layout.num_jobs,
            num_decodes=layout.num_decodes,
            num_tokens=layout.num_tokens,
            num_sampled=num_sampled,
            size=size,
            token_ids=token_ids,
            positions=positions,
            sampled=sampled[:num_sampled],
            batch=AttentionBatch(groups),
        )

    def _capacities(self, num_jobs: int) -> list[int]:
        """For each kind of layers the most items of decode work for ``num_jobs`` jobs."""
        capacities = []
        for kind, splits_a_job in zip(self._kinds, self._splits_a_job, strict=True):
            most = num_jobs * splits_a_job
            if kind.window is None:  # the jobs fill the cache, and each begins one more split
                most = min(most, num_jobs + self._splits_in_cache)
            capacities.append(most)
        return capacities

    def _most_bytes(self, limits: StepLimits) -> int:
        jobs, tokens = limits.max_jobs, limits.max_tokens
        no_jobs = np.zeros(jobs)
        decode_works = [work_lists.decode_work(no_jobs, most) for most in self._capacities(jobs)]
        tiles = np.zeros(1 + 2 * (jobs + tokens // self._tile), dtype=np.int32)
        prefill_works = [tiles] * len(self._kinds)
        groups = self.num_groups
        by_token = [np.zeros(tokens, dtype=np.int64)] * 2
        by_token.append(np.zeros((groups, tokens), dtype=np.int64))
        by_job = [np.zeros(jobs, dtype=np.int64)] * 3 + [np.zeros(jobs + 1, dtype=np.int32)]
        by_job.append(np.zeros((groups, jobs), dtype=np.int64))
        return Staging.size_of(
            [*by_token, *by_job, *decode_works, *prefill_works, self._most_tables]
        )


def _most_splits(max_model_len: int, window: int | None) -> int:
    """The most items of decode work that one job makes."""
    most = int(work_lists.num_splits(max_model_len))
    if window is None:
        return most
    return min(most, 1 + int(work_lists.num_splits(window)))
