"""Chooses the next token of every sampling row, for the whole batch at once: from the logits to the
answer. `token_choice` makes the choice itself.

Randomness is one uniform number for each token. The engine makes it from the job's seed and the
token's index. Inverting the distribution with it gives the same token in any batch.

The host knows the engine's message, so it decides which rows need which treatment. It does not wait
for the device: it starts the copy of the results, and reads them when the device has finished.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from fastserve_kernels import ops
from torch import Tensor

from fastserve_backend.rank_protocol.messages import (
    LogitBias,
    Penalties,
    Sampling,
    StepResult,
    TopLogprobs,
)
from fastserve_backend.worker.staging import Uploads
from fastserve_backend.worker.token_choice import choose, of_tokens

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
        answers: Tensor,
        logprob_rows: Array = _NO_ROWS,
        logprobs: Sequence[Tensor] = (),
        groups: Sequence[Array] = (),
        uploads: Uploads | None = None,
    ) -> None:
        """
        Args:
            answers: int64 [R], the tokens, or NO_TOKEN for rows that have none to choose.
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
        self._on_host = start_copy([answers, *logprobs])

    def result(self, step_id: int, compute_s: float) -> StepResult:
        """The message that answers the step. Call this only when the device has finished it."""
        chosen = self.on_host()
        return StepResult(
            step_id=step_id,
            token_ids=chosen.token_ids.numpy().astype(np.int32).tobytes(),
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
    greedy: tuple[Tensor, Tensor] | None = None,
) -> SampledTokens:
    """Choose a token for each row. Log-probabilities are those of the unmodified logits.

    Args:
        logits: [R, vocab] of any float type; they are not changed.
        sampling: None: choose greedily for every row.
        input_ids: int64, the step's tokens, those of decodes first. Only penalties with
            ``is_pending`` need them.
        greedy: the `ops.greedy_tokens` of the logits, if they are known.
    """
    if sampling is None:
        return SampledTokens(*(greedy or ops.greedy_tokens(logits)))
    uploads = Uploads(logits.device)
    without_eos = np.flatnonzero(np.frombuffer(sampling.no_eos, dtype=np.bool_))
    bans_eos = len(without_eos) > 0 and len(eos_token_ids) > 0
    scores = logits
    if sampling.masks or bans_eos or sampling.biases or sampling.penalties:
        scores = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        scores.copy_(logits)
    if sampling.masks:
        _mask(scores, sampling, uploads)
    if bans_eos:
        ends = without_eos[:, None] * scores.shape[1] + np.array(eos_token_ids)
        scores.view(-1).index_fill_(0, uploads.bring(ends.ravel()), -math.inf)
    if sampling.biases:
        _add_biases(scores, sampling.biases, uploads)
    if sampling.penalties:
        _penalise(scores, sampling.penalties, input_ids, uploads)
    token_ids, answers = choose(scores, sampling, uploads)
    num_logprobs = np.frombuffer(sampling.num_logprobs, dtype=np.int32)
    if (num_logprobs >= 0).any():
        return _with_logprobs(token_ids, answers, logits, num_logprobs, uploads)
    return SampledTokens(token_ids, answers, uploads=uploads)


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
    token_ids: Tensor, answers: Tensor, logits: Tensor, num_logprobs: Array, uploads: Uploads
) -> SampledTokens:
    rows = np.flatnonzero(num_logprobs >= 0)
    index = uploads.bring(rows)
    logprobs = torch.log_softmax(logits[index].float(), dim=-1)
    own = of_tokens(logprobs, token_ids[index])
    wanted = num_logprobs[rows]
    # Group the rows that want equally many.
    groups = [np.flatnonzero(wanted == count) for count in np.unique(wanted[wanted > 0])]
    results = [own]
    for group in groups:
        values, ids = torch.topk(logprobs[uploads.bring(group)], int(wanted[group[0]]))
        results += [ids.int(), values]
    return SampledTokens(token_ids, answers, rows, results, groups, uploads)


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
