"""FastServe on Triton: a preemptive LLM server.

``LLM`` and the rest are loaded on first use, so that the command line's client side works
where only the client's dependencies are installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastserve_backend.grammars.structured_output import StructuredOutput
    from fastserve_backend.job import ServiceLevel
    from fastserve_backend.llm import LLM, Completion
    from fastserve_backend.sampling_params import SamplingParams

__all__ = ["LLM", "Completion", "SamplingParams", "ServiceLevel", "StructuredOutput"]


def __getattr__(name: str) -> Any:
    if name in ("LLM", "Completion"):
        from fastserve_backend import llm

        return getattr(llm, name)
    if name == "SamplingParams":
        from fastserve_backend.sampling_params import SamplingParams

        return SamplingParams
    if name == "ServiceLevel":
        from fastserve_backend.job import ServiceLevel

        return ServiceLevel
    if name == "StructuredOutput":
        from fastserve_backend.grammars.structured_output import StructuredOutput

        return StructuredOutput
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
