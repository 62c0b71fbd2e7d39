"""Chooses each row's token from its scores: on a GPU by its kernels, on a CPU by torch.

Both follow the same rules (`fastserve_kernels.gpu.token_choice`) and take the same random number,
so they choose the same token, unless it lies where rounding decides.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from fastserve_kernels import ops
from torch import Tensor

from fastserve_backend.rank_protocol.messages import NO_TOKEN, Sampling
from fastserve_backend.worker.staging import Uploads

Array = npt.NDArray[Any]


class RowRules:
    """How each of R rows chooses, as arrays of the host."""

    def __init__(self, sampling: Sampling, vocab: int) -> None:
        self.temperature = np.frombuffer(sampling.temperature, dtype=np.float32)
        self.is_random: Array = self.temperature > 0
        top_k = np.frombuffer(sampling.top_k, dtype=np.int32)
        self.top_k: Array = np.where(top_k < vocab, top_k, 0)
        """int32 [R]; 0 = all."""
        self.top_p = np.frombuffer(sampling.top_p, dtype=np.float32)
        self.uniform = np.frombuffer(sampling.uniform, dtype=np.float64)
        self.has_filter: Array = self.is_random & ((self.top_k > 0) | (self.top_p < 1))
        min_p = np.frombuffer(sampling.min_p or bytes(len(sampling.top_p)), dtype=np.float32)
        with np.errstate(divide="ignore", invalid="ignore"):
            depth = np.where(min_p > 0, self.temperature * np.log(min_p.astype(float)), -math.inf)
        self.depth: Array = depth.astype(np.float32)
        """float32 [R]: min_p drops scores that are further below the largest one."""

    def words(self) -> Array:
        """The rules as the kernels take them."""
        scale = np.zeros(len(self.top_k), dtype=np.float32)
        np.divide(math.log2(math.e), self.temperature, out=scale, where=self.is_random)
        top_p = np.full(len(self.top_p), 2**64 - 1, dtype=np.uint64)
        below_1 = self.top_p < 1
        top_p[below_1] = (self.top_p[below_1] * 2.0**64).astype(np.uint64)
        columns = [
            (self.uniform * 2.0**64).astype(np.uint64).view(np.int64),
            top_p.view(np.int64),
            self.top_k,
            scale.view(np.int32),
            self.depth.view(np.int32),
        ]
        return np.stack(columns, axis=1, dtype=np.int64)


def choose(scores: Tensor, sampling: Sampling, uploads: Uploads) -> tuple[Tensor, Tensor]:
    """Choose a token for each row of scores, float [R, vocab], rows contiguous.

    Returns two int64 [R]: tokens, all in the vocabulary, and the same with NO_TOKEN for rows that
    have none to choose.
    """
    rules = RowRules(sampling, scores.shape[1])
    if not ops.uses_triton(scores.device):
        return _choose_in_torch(scores.float(), rules)
    # torch for a CPU comes without Triton.
    from fastserve_kernels.gpu import token_choice

    filters = bool(rules.has_filter.any())
    words = uploads.bring(rules.words())
    return token_choice.choose_tokens(scores, words, filters=filters, no_token=NO_TOKEN)


def of_tokens(rows: Tensor, token_ids: Tensor) -> Tensor:
    """The entry of each row for its token: [R]."""
    return rows.gather(1, token_ids[:, None])[:, 0]


def _choose_in_torch(scores: Tensor, rules: RowRules) -> tuple[Tensor, Tensor]:
    if rules.is_random.all():
        token_ids, answers = torch.empty(2, len(scores), dtype=torch.int64)
    else:
        token_ids, answers = ops.greedy_tokens(scores)
    # Filters sort the scores, so rows without one are treated apart.
    for has_filter in (False, True):
        rows = np.flatnonzero(rules.is_random & (rules.has_filter == has_filter))
        if len(rows) == 0:
            continue
        index = torch.from_numpy(rows)
        # Usually all rows are of one kind. Copying them would take as long as the softmax.
        of_rows = scores if len(rows) == len(scores) else scores[index]
        heat = torch.from_numpy(rules.temperature[rows, None])
        probabilities = torch.softmax(of_rows / heat, dim=-1)
        largest = of_rows.amax(dim=-1, keepdim=True)
        depth = rules.depth[rows, None]
        if np.isfinite(depth).any():
            probabilities.masked_fill_(of_rows < largest + torch.from_numpy(depth), 0.0)
        uniform = torch.from_numpy(rules.uniform[rows])
        if has_filter:
            top_k, top_p = rules.top_k[rows], rules.top_p[rows]
            chosen = _invert_filtered(of_rows, probabilities, uniform, top_k, top_p)
        else:
            chosen = _invert(probabilities, uniform)
        token_ids[index] = chosen
        answers[index] = torch.where(largest[:, 0].isfinite(), chosen, NO_TOKEN)
    return token_ids, answers


def _invert(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The index where the cumulative distribution passes ``uniform``. Rows [R, n] need not sum to
    1."""
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    threshold = (uniform * cumulative[:, -1])[:, None]
    index = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    return index.clamp_(max=probabilities.shape[-1] - 1)


def _invert_filtered(
    scores: Tensor, probabilities: Tensor, uniform: Tensor, top_k: Array, top_p: Array
) -> Tensor:
    vocab = scores.shape[-1]
    if (top_k > 0).all():
        # Sorting the vocabulary takes milliseconds. With a top_k the few largest are enough.
        ids = _largest(scores, int(top_k.max()))
    else:
        ids = torch.sort(scores, dim=-1, descending=True, stable=True)[1]
    rank = torch.arange(ids.shape[-1])[None, :]
    limit = torch.from_numpy(np.where(top_k > 0, top_k, vocab)[:, None])
    kept = probabilities.gather(1, ids).masked_fill_(rank >= limit, 0.0)
    # top_p applies to what top_k and min_p have kept. A token stays if those above it have not
    # reached top_p.
    cumulative = kept.cumsum(dim=-1, dtype=torch.float64)
    before = cumulative - kept
    share = torch.from_numpy(top_p[:, None]) * cumulative[:, -1:]
    # The first always stays, because a tiny top_p may be rounded to 0.
    kept.masked_fill_((before >= share) & (rank > 0), 0.0)
    # Back to the order of the vocabulary.
    if ids.shape[-1] == vocab:
        return _invert(probabilities.scatter_(1, ids, kept), uniform)
    ids, order = ids.sort(dim=-1)
    return ids.gather(1, _invert(kept.gather(1, order), uniform)[:, None])[:, 0]


def _largest(scores: Tensor, count: int) -> Tensor:
    """The places of each row's largest, int64 [R, count], in the order of a stable sort.

    Among equal values ``topk`` takes any, depending on the count, and so on the other rows' top_k.
    So the keys sorted here are all different: the score as a whole number in the same order, and
    then the place.
    """
    places = torch.arange(scores.shape[-1])
    bits = (scores + 0.0).view(torch.int32)  # -0 becomes 0
    bits ^= (bits >> 31) & 0x7FFFFFFF
    keys = torch.add(-places, bits, alpha=2**32, out=_scratch.take(scores.shape))
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
