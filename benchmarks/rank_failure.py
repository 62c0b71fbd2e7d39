"""The pause that clients see when a rank dies or hangs, on the real engine.

    python benchmarks/rank_failure.py

OPT-125M with dummy weights on this machine. Streams run; half-way the rank is killed (SIGKILL), or
stopped (SIGSTOP), which only its missing heartbeats show. The pause of a stream is the longest time
between two of its tokens.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import threading
import time

import psutil
from fastserve_backend import LLM, SamplingParams
from fastserve_backend.job import JobOutput
from replay import MODEL

PROMPT_TOKENS = 64


class Stream:
    """What a client sees; sends the signal when it has half its tokens."""

    def __init__(self, signal_after: int, number: signal.Signals | None) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.ended = threading.Event()
        self._signal_after = signal_after
        self._signal = number

    def __call__(self, output: JobOutput) -> None:
        self.tokens += output.token_ids
        self.times.append(time.monotonic())
        if self._signal is not None and len(self.times) == self._signal_after:
            for rank in psutil.Process().children():
                rank.send_signal(self._signal)
        if output.finish_reason is not None:
            self.ended.set()


def serve(llm: LLM, num_streams: int, length: int, number: signal.Signals | None) -> list[Stream]:
    params = SamplingParams(max_tokens=length, temperature=0, ignore_eos=True)
    streams = [Stream(length // 2, number if index == 0 else None) for index in range(num_streams)]
    for index, stream in enumerate(streams):
        llm.engine.submit(str(index), [4 + index] * PROMPT_TOKENS, params, stream)
    for stream in streams:
        stream.ended.wait()
    return streams


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--length", type=int, default=64, help="tokens of each stream")
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    with LLM(MODEL, load_format="dummy", dtype=arguments.dtype, device_blocks=400) as llm:
        sizes = arguments.streams, arguments.length
        undisturbed = serve(llm, *sizes, None)
        for number in (signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP):
            streams = serve(llm, *sizes, number)
            pauses = [
                max(after - before for before, after in zip(one.times, one.times[1:], strict=False))
                for one in streams
            ]
            same = sum(
                one.tokens == other.tokens for one, other in zip(streams, undisturbed, strict=True)
            )
            print(
                f"{number.name}: pause {statistics.median(pauses):.2f} s "
                f"(longest {max(pauses):.2f} s), {same} of {len(streams)} streams have the tokens "
                "of the undisturbed run"
            )


if __name__ == "__main__":
    main()
