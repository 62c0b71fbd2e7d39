from __future__ import annotations

from fastserve_client import Chunk, Completion, PerfMetrics, TokenLogprob

_PERF = PerfMetrics(1, 2, 3, 4, num_preemptions=5, num_swaps=0, queue_level=2)


def test_chunks_join_to_a_completion() -> None:
    first, second = TokenLogprob(11, "He", -0.25), TokenLogprob(12, "y", -0.5)
    completion = Completion.from_chunks(
        [
            Chunk("He", (11,), None, 4, (first,), -0.25),
            Chunk("", (), None, 4, (), -0.25),
            Chunk("y!", (12, 13), "length", 4, (second,), -0.75, _PERF, 2),
        ]
    )
    assert completion == Completion(
        text="Hey!",
        token_ids=(11, 12, 13),
        finish_reason="length",
        num_input_tokens=4,
        logprobs=(first, second),
        cumulative_logprob=-0.75,
        perf=_PERF,
        num_cached_tokens=2,
    )
    assert completion.num_cached_tokens == 2
    assert completion.num_output_tokens == 3


def test_an_interrupted_stream_has_no_finish_reason() -> None:
    assert Completion.from_chunks([Chunk("a", (1,))]).finish_reason is None


def test_no_chunks_make_an_empty_completion() -> None:
    completion = Completion.from_chunks([])
    assert (completion.text, completion.num_output_tokens) == ("", 0)
