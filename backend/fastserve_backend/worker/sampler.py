"""Choose the next token of every row that samples, vectorised over the batch.

Randomness is one uniform number a token, made by the engine from the job's seed and the token's
index; inverting the distribution with it gives the same token whatever else is in the batch.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from fastserve_kernels import ops
from torch import Tensor

from fastserve_backend.worker.messages import Penalties, Sampling, TopLogprobs


class SampledTokens:
    """``token_ids`` int64 [R] on the CPU, and what ``StepResult`` says of log-probabilities."""

    def __init__(self, token_ids: Tensor) -> None:
        self.token_ids = token_ids
        self.logprobs = b""
        self.top_logprobs: list[TopLogprobs] = []


def sample(
    logits: Tensor, sampling: Sampling | None, eos_token_ids: tuple[int, ...]
) -> SampledTokens:
    """``logits`` [R, vocab], of any float type; they are not changed.

    ``sampling`` None chooses every row greedily. Log-probabilities are of the unmodified logits.
    """
    if sampling is None:
        return SampledTokens(ops.argmax_rows(logits).cpu())
    raw = logits.float()
    scores = raw.clone()
    no_eos = np.frombuffer(sampling.no_eos, dtype=np.bool_)
    if no_eos.any() and eos_token_ids:
        rows = torch.from_numpy(np.flatnonzero(no_eos)).to(scores.device)
        ends = torch.tensor(eos_token_ids, device=scores.device)
        scores[rows[:, None], ends] = -math.inf
    for penalties in sampling.penalties:
        _penalise(scores[penalties.row], penalties)
    chosen = SampledTokens(_choose(scores, sampling).cpu())
    num_logprobs = np.frombuffer(sampling.num_logprobs, dtype=np.int32)
    if (num_logprobs >= 0).any():
        _add_logprobs(chosen, raw, num_logprobs)
    return chosen


def _choose(scores: Tensor, sampling: Sampling) -> Tensor:
    device = scores.device
    temperature = _tensor(sampling.temperature, np.float32, device)
    top_k = _tensor(sampling.top_k, np.int32, device)
    top_p = _tensor(sampling.top_p, np.float32, device)
    uniform = _tensor(sampling.uniform, np.float64, device)
    token_ids = ops.argmax_rows(scores)
    random = temperature > 0
    filtered = random & ((top_k > 0) | (top_p < 1))
    # Filtering sorts the vocabulary, so rows that need none are kept out of it.
    if len(rows := (random & ~filtered).nonzero()[:, 0]):
        probabilities = torch.softmax(scores[rows] / temperature[rows, None], dim=-1)
        token_ids[rows] = _invert(probabilities, uniform[rows])
    if len(rows := filtered.nonzero()[:, 0]):
        probabilities = torch.softmax(scores[rows] / temperature[rows, None], dim=-1)
        token_ids[rows] = _invert_filtered(probabilities, uniform[rows], top_k[rows], top_p[rows])
    return token_ids


def _invert(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Index where the cumulative distribution passes ``uniform``; rows [R, n] need no sum of 1."""
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    threshold = (uniform * cumulative[:, -1])[:, None]
    index = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    return index.clamp_(max=probabilities.shape[-1] - 1)


def _invert_filtered(
    probabilities: Tensor, uniform: Tensor, top_k: Tensor, top_p: Tensor
) -> Tensor:
    vocab = probabilities.shape[-1]
    if bool((top_k > 0).all()):
        # Sorting the vocabulary costs milliseconds; with a top_k the few largest do.
        count = min(vocab, int(top_k.max()))
        ordered, ids = torch.topk(probabilities, count, dim=-1, sorted=True)
    else:
        ordered, ids = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[-1], device=ordered.device)[None, :]
    limit = torch.where(top_k > 0, top_k, vocab)[:, None]
    kept = ordered.masked_fill(rank >= limit, 0.0)
    # top_p counts what top_k has left; a token stays while those above it have not reached top_p.
    before = kept.cumsum(dim=-1) - kept
    kept = kept.masked_fill(before >= top_p[:, None] * kept.sum(dim=-1, keepdim=True), 0.0)
    return ids.gather(1, _invert(kept, uniform)[:, None])[:, 0]


def _penalise(scores: Tensor, penalties: Penalties) -> None:
    """In place on one row. ``repetition`` counts prompt and output, the others the output alone."""
    output = _tensor(penalties.output_ids, np.int32, scores.device).long()
    prompt = _tensor(penalties.prompt_ids, np.int32, scores.device).long()
    if penalties.repetition != 1.0:
        seen = torch.unique(torch.cat([prompt, output]))
        values = scores[seen]
        scores[seen] = torch.where(
            values > 0, values / penalties.repetition, values * penalties.repetition
        )
    ids, counts = torch.unique(output, return_counts=True)
    scores[ids] -= penalties.presence + penalties.frequency * counts


def _add_logprobs(chosen: SampledTokens, raw: Tensor, num_logprobs: npt.NDArray[np.int32]) -> None:
    rows = np.flatnonzero(num_logprobs >= 0)
    index = torch.from_numpy(rows).to(raw.device)
    logprobs = torch.log_softmax(raw[index], dim=-1)
    own = logprobs.gather(1, chosen.token_ids.to(raw.device)[index][:, None])[:, 0]
    values = np.zeros(len(num_logprobs), dtype=np.float32)
    values[rows] = own.cpu().numpy()
    chosen.logprobs = values.tobytes()
    for position, row in enumerate(rows.tolist()):
        count = int(num_logprobs[row])
        if count:
            top, ids = torch.topk(logprobs[position], count)
            chosen.top_logprobs.append(
                TopLogprobs(row, ids.int().cpu().numpy().tobytes(), top.cpu().numpy().tobytes())
            )


def _tensor(data: bytes, dtype: type[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=dtype).copy()).to(device)
