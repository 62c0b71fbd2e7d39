"""What a server's latest picture says about the wait for a first token there."""

from __future__ import annotations

from dataclasses import dataclass

from fastserve_client.engine_state import EngineState


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """The load of one server at one moment."""

    num_jobs: int
    """Running and waiting."""
    waiting_prompt_tokens: int
    """Tokens that jobs without a first token still have to compute."""
    prefill_tokens_per_s: float | None
    """Speed of prompts beside the jobs that decode; None: the server does not tell."""
    kv_tokens: int
    """That the KV blocks of the device hold, of jobs within their windows."""
    computed_tokens: int
    """Since the server's start. Kept KV ages by it: new KV takes the place of old KV."""

    @classmethod
    def of(cls, state: EngineState) -> ServerLoad:
        totals = state.totals
        return cls(
            num_jobs=state.running + state.waiting,
            waiting_prompt_tokens=state.waiting_prompt_tokens,
            prefill_tokens_per_s=state.prefill_tokens_per_s,
            kv_tokens=state.device.num_blocks * state.block_size // state.num_groups,
            computed_tokens=(
                totals.prompt_tokens - totals.reused_prompt_tokens + totals.generation_tokens
            ),
        )
