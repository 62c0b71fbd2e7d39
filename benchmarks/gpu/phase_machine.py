"""Phase "machine": how fast memory, tensor cores and the link to the host are here."""

from __future__ import annotations

from benchmarks.gpu.ceilings import copy_rate, gemm_rate, link_rates, read_rate
from benchmarks.gpu.phase_context import Context


def run(context: Context) -> None:
    rate, timing = copy_rate(context.device)
    context.recorder.row(
        "ceilings",
        {"what": "copy within device memory, read + written"},
        {"rate": rate / 1e9, "unit": "GB/s", "spread": timing.spread},
    )
    rate, timing = read_rate(context.device)
    context.recorder.row(
        "ceilings",
        {"what": "sum over device memory, read"},
        {"rate": rate / 1e9, "unit": "GB/s", "spread": timing.spread},
    )
    flops, timing = gemm_rate(context.device)
    context.recorder.row(
        "ceilings",
        {"what": "bfloat16 product of two 8192² matrices"},
        {"rate": flops / 1e12, "unit": "TFLOP/s", "spread": timing.spread},
    )
    names = {
        "out": "pinned copy to the host",
        "in": "pinned copy from the host",
        "both": "both at once",
    }
    for direction, rate in link_rates(context.device).items():
        context.recorder.row(
            "ceilings",
            {"what": names[direction]},
            {"rate": rate / 1e9, "unit": "GB/s", "spread": None},
        )
