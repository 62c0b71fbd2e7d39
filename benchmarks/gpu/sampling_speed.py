"""How long the choice of a batch's tokens takes, to compare with a whole decode step."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
import torch
from fastserve_backend.rank_protocol.messages import Sampling
from fastserve_backend.worker.sampler import sample

from benchmarks.gpu.phase_context import Context

ROWS = 64
VOCABULARIES = (50272, 128256)
"""Vocabulary sizes: OPT's and LLaMA 3's."""
TOP_P, TOP_K = 0.9, 50
SPREADS = {"flat": 1.0, "peaked": 4.0}
"""Standard deviations of the logits. In a flat row top-p keeps most tokens, in a peaked one few, as
after most texts."""
REPEATS = 20


@torch.inference_mode()
def run(context: Context) -> None:
    rows, vocabularies = (2, (300,)) if context.tiny else (ROWS, VOCABULARIES)
    choices = {
        "greedy": None,
        "random": _sampling(rows),
        f"top-p {TOP_P}": _sampling(rows, top_p=TOP_P),
        f"top-k {TOP_K}": _sampling(rows, top_k=TOP_K),
        f"top-k {TOP_K}, top-p {TOP_P}": _sampling(rows, top_k=TOP_K, top_p=TOP_P),
    }
    for vocabulary, (shape, spread) in product(vocabularies, SPREADS.items()):
        # The same logits each time: a step's logits were just written too, and are in the cache.
        logits = torch.randn(rows, vocabulary, device=context.device.torch_device) * spread
        for choice, sampling in choices.items():
            call = partial(sample, logits.bfloat16(), sampling, ())
            timing = context.device.queued_time(call, REPEATS)
            context.recorder.row(
                "choice of tokens",
                {"choice": choice, "logits": shape, "rows": rows, "vocabulary": vocabulary},
                {"µs": timing.seconds * 1e6, "spread": timing.spread},
            )


def _sampling(rows: int, top_p: float = 1.0, top_k: int = 0) -> Sampling:
    """At temperature 1, all rows alike."""
    return Sampling(
        temperature=np.ones(rows, dtype=np.float32).tobytes(),
        top_k=np.full(rows, top_k, dtype=np.int32).tobytes(),
        top_p=np.full(rows, top_p, dtype=np.float32).tobytes(),
        uniform=np.linspace(0.01, 0.99, rows).tobytes(),
        no_eos=np.zeros(rows, dtype=np.bool_).tobytes(),
        num_logprobs=np.full(rows, -1, dtype=np.int32).tobytes(),
        penalties=[],
    )
