"""Latency profiles whose coefficients are known, and small machines to measure."""

from __future__ import annotations

from fastserve_backend.profile.latency import Curve, Identity, LatencyProfile
from fastserve_backend.profile.loads import Limits
from fastserve_backend.rank_protocol.link import Link

LIMITS = Limits(
    max_seqs=16, max_batched_tokens=2048, max_model_len=2048, num_blocks=4096, block_size=16
)

LINK = Link(1e-4, 2e-4)


def identity(**changes: object) -> Identity:
    values: dict[str, object] = {
        "model": "tiny",
        "shape": {"num_layers": 2, "hidden_size": 64, "vocab_size": 300},
        "hardware": "a slide rule",
        "dtype": "float32",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "block_size": 16,
        "max_model_len": 2048,
    }
    return Identity(**(values | changes))  # type: ignore[arg-type]


def known_profile() -> LatencyProfile:
    """A machine whose time is that of reading weights up to 16 tokens, then that of multiplying."""
    return LatencyProfile(
        identity=identity(),
        num_blocks=4096,
        link=LINK,
        num_samples=0,
        held_out_error=None,
        base_s=0.004,
        tokens=Curve((0, 16, 64), (1e-5, 1e-4, 2e-4)),
        sampled=Curve((0, 1), (1e-3, 1e-4)),
        decode_context_s=1e-6,
        prefill_pair_s=1e-8,
        scored_token_s=5e-5,
    )
