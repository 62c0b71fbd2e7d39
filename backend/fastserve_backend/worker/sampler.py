"""Chooses the next token of every sampling row, for the whole batch at once.

Randomness is one uniform number for each token. The engine makes it from the job's seed and the
token's index. Inverting the distribution with it gives the same token in any batch.

The host knows the engine's message, so it decides which rows need which treatment. It does not wait
for the device: it starts the copy of the results, and reads them when the device has finished.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from fastserve_kernels import ops
from torch import Tensor

from fastserve_backend.rank_protocol.messages import (
    NO_TOKEN,
    LogitBias,
    Penalties,
    Sampling,
    StepResult,
    TopLogprobs,
)
from fastserve_backend.worker.staging import Uploads

Array = npt.NDArray[Any]
_NO_ROWS: Array = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class ChosenTokens:
    """The chosen tokens on the host: ``token_ids`` int64 [R], the rest as in ``StepResult``."""

    token_ids: Tensor
    logprobs: bytes
    top_logprobs: list[TopLogprobs]


class SampledTokens:
    """The chosen tokens, on the device and on their way to the host.

    Keep it until the device has finished: it holds the memory of the copies.
    """

    def __init__(
        self,
        token_ids: Tensor,
        chosen: Tensor,
        logprob_rows: Array = _NO_ROWS,
        logprobs: Sequence[Tensor] = (),
        groups: Sequence[Array] = (),
        uploads: Uploads | None = None,
    ) -> None:
        """
        Args:
            chosen: [R], the logit or probability by which each token was chosen; NaN if a row has
                none to choose.
            logprob_rows: the rows whose log-probabilities are wanted.
            logprobs: float32, those of their tokens. Then for each group the most likely tokens,
                int32 [rows of the group, n], and their log-probabilities, float32.
            groups: for each group, its indices into ``logprob_rows``.
            uploads: host memory that the choice still reads.
        """
        self.token_ids = token_ids
        """int64 [R], on the device. All are in the vocabulary, because a next step may run them."""
        self._logprob_rows = logprob_rows
        self._groups = groups
        self._uploads = uploads
        self._on_host = start_copy([torch.where(chosen.isnan(), NO_TOKEN, token_ids), *logprobs])

    def result(self, step_id: int, compute_s: float) -> StepResult:
        """The message that answers the step. Call this only when the device has finished it."""
        chosen = self.on_host()
        return StepResult(
            step_id=step_id,
            token_ids=chosen.token_ids.to(torch.int32).numpy().tobytes(),
            compute_s=compute_s,
            logprobs=chosen.logprobs,
            top_logprobs=chosen.top_logprobs,
        )

    def on_host(self) -> ChosenTokens:
        """Call this only when the device has finished the sampling."""
        token_ids, *logprobs = self._on_host
        if not logprobs:
            return ChosenTokens(token_ids, b"", [])
        rows = self._logprob_rows
        of_all = np.zeros(len(token_ids), dtype=np.float32)
        of_all[rows] = logprobs[0].numpy()
        tops = [
            TopLogprobs(int(rows[position]), top.numpy().tobytes(), of_top.numpy().tobytes())
            for group, ids, values in zip(self._groups, logprobs[1::2], logprobs[2::2], strict=True)
            for position, top, of_top in zip(group, ids, values, strict=True)
        ]
        return ChosenTokens(token_ids, of_all.tobytes(), sorted(tops, key=lambda top: top.row))


def sample(
    logits: Tensor,
    sampling: Sampling | None,
    eos_token_ids: tuple[int, ...],
    input_ids: Tensor | None = None,
    greedy_ids: Tensor | None = None,
) -> SampledTokens:
    """Choose a token for each row. Log-probabilities are those of the unmodified logits.

    Args:
        logits: [R, vocab] of any float type; they are not changed.
        sampling: None: choose greedily for every row.
        input_ids: int64, the step's tokens, those of decodes first. Only penalties with
            ``is_pending`` need them.
        greedy_ids: int64 [R], the `ops.argmax_rows` of the logits, if it is known.
    """
    if sampling is None:
        token_ids = ops.argmax_rows(logits) if greedy_ids is None else greedy_ids
        return SampledTokens(token_ids, of_tokens(logits, token_ids))
    raw = logits.float()
    uploads = Uploads(raw.device)
    without_eos = np.flatnonzero(np.frombuffer(sampling.no_eos, dtype=np.bool_))
    bans_eos = len(without_eos) > 0 and len(eos_token_ids) > 0
    scores = raw
    if sampling.masks or bans_eos or sampling.biases or sampling.penalties:
        scores = raw.clone(memory_format=torch.contiguous_format)
    if sampling.masks:
        _mask(scores, sampling, uploads)
    if bans_eos:
        ends = without_eos[:, None] * scores.shape[1] + np.array(eos_token_ids)
        scores.view(-1).index_fill_(0, uploads.bring(ends.ravel()), -math.inf)
    if sampling.biases:
        _add_biases(scores, sampling.biases, uploads)
    if sampling.penalties:
        _penalise(scores, sampling.penalties, input_ids, uploads)
    token_ids, chosen = _choose(scores, sampling, uploads)
    num_logprobs = np.frombuffer(sampling.num_logprobs, dtype=np.int32)
    if (num_logprobs >= 0).any():
        return _with_logprobs(token_ids, chosen, raw, num_logprobs, uploads)
    return SampledTokens(token_ids, chosen, uploads=uploads)


def of_tokens(rows: Tensor, token_ids: Tensor) -> Tensor:
    """The entry of each row for its token: [R]."""
    return rows.gather(1, token_ids[:, None])[:, 0]


def _choose(scores: Tensor, sampling: Sampling, uploads: Uploads) -> tuple[Tensor, Tensor]:
    """The tokens, and the logit or probability by which each was chosen."""
    temperature = np.frombuffer(sampling.temperature, dtype=np.float32)
    top_k = np.frombuffer(sampling.top_k, dtype=np.int32)
    top_p = np.frombuffer(sampling.top_p, dtype=np.float32)
    min_p = np.frombuffer(sampling.min_p or bytes(len(sampling.top_p)), dtype=np.float32)
    uniform = np.frombuffer(sampling.uniform, dtype=np.float64)
    random = temperature > 0
    filtered = random & ((top_k > 0) | (top_p < 1))
    if random.all():
        token_ids = torch.empty(len(scores), dtype=torch.int64, device=scores.device)
        chosen = torch.empty(len(scores), device=scores.device)
    else:
        token_ids = ops.argmax_rows(scores)
        chosen = of_tokens(scores, token_ids)
    # Filtering sorts the vocabulary, so rows without a filter are treated apart.
    for is_filtered in (False, True):
        rows = np.flatnonzero(random & (filtered == is_filtered))
        if len(rows) == 0:
            continue
        index = uploads.bring(rows)
        heat = uploads.bring(temperature[rows, None])
        # Usually all rows are of one kind. Copying them would take as long as the softmax.
        of_rows = scores if len(rows) == len(scores) else scores[index]
        probabilities = torch.softmax(of_rows / heat, dim=-1)
        if is_filtered:
            inverted = _invert_filtered(
                probabilities, uniform[rows], top_k[rows], top_p[rows], min_p[rows], uploads
            )
        else:
            _drop_unlikely(probabilities, min_p[rows], uploads)
            inverted = _invert(probabilities, uploads.bring(uniform[rows]))
        token_ids[index] = inverted
        chosen[index] = of_tokens(probabilities, inverted)
    return token_ids, chosen


def _invert(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The index where the cumulative distribution passes ``uniform``. Rows [R, n] need not sum to
    1."""
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    threshold = (uniform * cumulative[:, -1])[:, None]
    index = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    return index.clamp_(max=probabilities.shape[-1] - 1)


def _drop_unlikely(probabilities: Tensor, min_p: Array, uploads: Uploads) -> None:
    """Set what is below ``min_p`` [R] times the largest of its row to 0, in place."""
    if min_p.any():
        least = uploads.bring(min_p[:, None]) * probabilities.amax(dim=-1, keepdim=True)
        probabilities.masked_fill_(probabilities < least, 0.0)


def _invert_filtered(
    probabilities: Tensor,
    uniform: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    uploads: Uploads,
) -> Tensor:
    vocab = probabilities.shape[-1]
    if (top_k > 0).all():
        # Sorting the vocabulary takes milliseconds. With a top_k the few largest are enough.
        ids = _largest(probabilities, min(vocab, int(top_k.max())))
        ordered = probabilities.gather(1, ids)
    else:
        ordered, ids = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[-1], device=ordered.device)[None, :]
    limit = uploads.bring(np.where(top_k > 0, top_k, vocab)[:, None])
    kept = ordered.masked_fill(rank >= limit, 0.0)
    _drop_unlikely(kept, min_p, uploads)
    # top_p applies to what top_k and min_p have kept. A token stays if those above it have not
    # reached top_p.
    cumulative = kept.cumsum(dim=-1, dtype=torch.float64)
    before = cumulative - kept
    share = uploads.bring(top_p[:, None]) * cumulative[:, -1:]
    # The first always stays, because a tiny top_p may be rounded to 0.
    kept = kept.masked_fill((before >= share) & (rank > 0), 0.0)
    return ids.gather(1, _invert(kept, uploads.bring(uniform))[:, None])[:, 0]


def _largest(probabilities: Tensor, count: int) -> Tensor:
    """The places of each row's largest, int64 [R, count], in the order of a stable sort.

    Among equal values ``topk`` takes any, depending on the count, and so on the other rows' top_k.
    So the keys sorted here are all different: the value's bits, which order non-negative floats
    correctly, followed by the place.
    """
    places = torch.arange(probabilities.shape[-1], device=probabilities.device)
    keys = _scratch.take(probabilities.shape) if probabilities.device.type == "cpu" else None
    keys = torch.add(-places, probabilities.view(torch.int32), alpha=2**32, out=keys)
    return torch.topk(keys, count, dim=-1, sorted=True)[1]


class _Scratch(threading.local):
    """Memory that is kept from step to step. On a CPU, allocating some megabytes anew takes longer
    than the work on them."""

    memory = torch.empty(0, dtype=torch.int64)

    def take(self, shape: torch.Size) -> Tensor:
        """int64, uninitialised; valid until the next call."""
        count = shape.numel()
        if count > len(self.memory):
            with torch.inference_mode(False):  # so that any mode may write it
                self.memory = torch.empty(count, dtype=torch.int64)
        return self.memory[:count].view(shape)


_scratch = _Scratch()


def _mask(scores: Tensor, sampling: Sampling, uploads: Uploads) -> None:
    """Make the tokens that a row may not choose infinitely unlikely, in place."""
    rows = np.frombuffer(sampling.masked_rows, dtype=np.int32)
    words = np.frombuffer(sampling.masks, dtype=np.int32).reshape(len(rows), -1)
    vocab = scores.shape[1]
    if scores.device.type == "cpu":  # without copying the rows, which takes longest
        for row, allowed in zip(rows.tolist(), words, strict=True):
            bits = np.unpackbits(allowed.view(np.uint8), count=vocab, bitorder="little")
            scores[row].masked_fill_(torch.from_numpy(bits == 0), -math.inf)
        return
    shifts = torch.arange(32, dtype=torch.int32, device=scores.device)
    bits_of_words = (uploads.bring(words)[:, :, None] >> shifts) & 1
    banned = bits_of_words.flatten(1)[:, :vocab] == 0
    index = uploads.bring(rows.astype(np.int64))
    scores[index] = scores[index].masked_fill(banned, -math.inf)


def _add_biases(scores: Tensor, biases: Sequence[LogitBias], uploads: Uploads) -> None:
    """Add the biases to their rows, in place."""
    offsets = np.array([bias.row for bias in biases]) * scores.shape[1]
    places = uploads.bring(_joined([bias.token_ids for bias in biases], offsets))
    values = np.concatenate([np.frombuffer(bias.values, dtype=np.float32) for bias in biases])
    flat = scores.view(-1)
    flat[places] += uploads.bring(values)


def _penalise(
    scores: Tensor, penalties: Sequence[Penalties], input_ids: Tensor | None, uploads: Uploads
) -> None:
    """Apply the penalties, in place. ``repetition`` counts tokens of prompt and output, the others
    those of the output alone."""
    vocab = scores.shape[1]
    offsets = np.arange(len(penalties)) * vocab
    prompt = uploads.bring(_joined([row.prompt_ids for row in penalties], offsets))
    output = uploads.bring(_joined([row.output_ids for row in penalties], offsets))
    rows = np.array([row.row for row in penalties])
    pending = np.flatnonzero([row.is_pending for row in penalties])
    if len(pending) > 0:
        assert input_ids is not None
        newest = input_ids[uploads.bring(rows[pending])]
        output = torch.cat([output, newest + uploads.bring(offsets[pending])])
    counts = torch.zeros(len(penalties) * vocab, device=scores.device)
    counts.index_add_(0, output, torch.ones_like(output, dtype=torch.float32))
    # A token that occurs more than once gets the same score each time.
    places = torch.cat([prompt, output])
    index, count = places // vocab, counts[places]
    amounts = np.array([(row.repetition, row.presence, row.frequency) for row in penalties])
    of_rows = uploads.bring(amounts.T.astype(np.float32))
    repetition, presence, frequency = (of_rows[column, index] for column in range(3))
    places += uploads.bring(rows * vocab - offsets)[index]
    flat = scores.view(-1)
    values = flat[places]
    values = torch.where(values > 0, values / repetition, values * repetition)
    flat[places] = values - torch.where(count > 0, presence + frequency * count, 0.0)


def _joined(token_ids: Sequence[bytes], offsets: Array) -> Array:
    """All lists joined, int64, each with its offset added."""
    lists = [np.frombuffer(one, dtype=np.int32).astype(np.int64) for one in token_ids]
    return np.concatenate([one + offset for one, offset in zip(lists, offsets, strict=True)])


def _with_logprobs(
    token_ids: Tensor, chosen: Tensor, raw: Tensor, num_logprobs: Array, uploads: Uploads
) -> SampledTokens:
    rows = np.flatnonzero(num_logprobs >= 0)
    index = uploads.bring(rows)
    logprobs = torch.log_softmax(raw[index], dim=-1)
    own = of_tokens(logprobs, token_ids[index])
    wanted = num_logprobs[rows]
    # Group the rows that want equally many.
    groups = [np.flatnonzero(wanted == count) for count in np.unique(wanted[wanted > 0])]
    results = [own]
    for group in groups:
        values, ids = torch.topk(logprobs[uploads.bring(group)], int(wanted[group[0]]))
        results += [ids.int(), values]
    return SampledTokens(token_ids, chosen, rows, results, groups, uploads)


def start_copy(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the host, by one copy on the current stream. Wider types must come first, so
    that all are aligned."""
    if len(tensors) == 1:
        return [_to_host(tensors[0])]
    parts = [tensor.contiguous().view(torch.uint8).flatten() for tensor in tensors]
    joined = _to_host(torch.cat(parts))
    on_host = torch.split(joined, [len(part) for part in parts])
    return [
        part.view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(on_host, tensors, strict=True)
    ]


def _to_host(tensor: Tensor) -> Tensor:
    """Copy a contiguous tensor, of a type of 4 or 8 bytes, to host memory; a tensor on the host is
    returned as it is.

    The copy runs on the current stream. Read the result only when the device has done it, and keep
    the result until then.
    """
    if tensor.device.type == "cpu":
        return tensor
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    # torch for a CPU comes without Triton.
    from fastserve_kernels.gpu.pinned_copies import copy_words

    copy_words(tensor, on_host)
    return on_host
