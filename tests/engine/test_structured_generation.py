"""Structured output and biases through the engine with real ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from collector import Collector, Trigger
from fastserve_backend import LLM, SamplingParams, StructuredOutput
from fastserve_backend.errors import InvalidRequestError
from fastserve_backend.job import FinishReason
from live_engine import small_engine
from small_model import EOS_TOKEN_IDS

pytestmark = pytest.mark.usefixtures("forked_ranks")

PROMPT = [10, 50, 90, 130, 170]
HOT = 4.0  # flattens the small model's sharp distributions
SCHEMA = {
    "type": "object",
    "properties": {
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["small", "large"]},
    },
    "required": ["size", "kind"],
    "additionalProperties": False,
}
DATE = r"\d{4}-\d\d-\d\d"


def bound(seed: int, **options: object) -> SamplingParams:
    wanted = {
        0: StructuredOutput(json_schema=SCHEMA),
        1: StructuredOutput(regex=DATE),
        2: StructuredOutput(choice=["yes", "no", "yes, but"]),
    }[seed % 3]
    keys = {"max_tokens": 250, "temperature": HOT, "seed": seed} | options
    return SamplingParams(structured_output=wanted, **keys)


def check(text: str, params: SamplingParams) -> None:
    wanted = params.structured_output
    assert wanted is not None
    if wanted.json_schema is not None:
        jsonschema.validate(json.loads(text), wanted.json_schema)
    elif wanted.regex is not None:
        assert re.fullmatch(wanted.regex, text)
    else:
        assert text in wanted.choice


def test_answers_are_what_was_asked_for_also_beside_others(llm: LLM) -> None:
    params = [bound(seed) for seed in range(6)]
    params += [SamplingParams(max_tokens=60, temperature=HOT, ignore_eos=True)] * 3
    answers = llm.generate([PROMPT] * 9, params, progress=False)
    for answer, wanted in zip(answers[:6], params[:6], strict=True):
        check(answer.text, wanted)
        assert answer.finish_reason is FinishReason.STOP
        assert answer.token_ids[-1] in EOS_TOKEN_IDS
    assert [len(answer.token_ids) for answer in answers[6:]] == [60] * 3
    again = llm.generate([PROMPT] * 6, params[:6], progress=False)
    assert [one.token_ids for one in again] == [one.token_ids for one in answers[:6]]


@pytest.mark.parametrize("strategy", ["proactive", "recompute"])
def test_swapped_and_recomputed_jobs_say_the_same(
    strategy: str, llm: LLM, checkpoint: Path, tokenizer: Path
) -> None:
    params = [bound(seed, temperature=0.0 if seed % 2 else HOT) for seed in range(10)]
    hot: dict[str, Any] = {"max_tokens": 40, "temperature": HOT, "seed": 1, "min_tokens": 40}
    params += [
        SamplingParams(allowed_token_ids=range(60, 64), bad_words=["<<", "<=?"], **hot),
        SamplingParams(bad_words=["ab", "b"], min_p=0.01, **hot),
    ]
    expected = llm.generate([PROMPT * 6] * 12, params, progress=False)
    with small_engine(
        checkpoint,
        tokenizer,
        device_blocks=18,
        strategy=strategy,
        base_quantum_ms=0.01,
        prefix_caching=False,
    ) as small:
        found = small.generate([PROMPT * 6] * 12, params, progress=False)
        counters = small.engine.counters
        assert counters.preemptions > 0
        assert counters.swap_out_bytes if strategy == "proactive" else counters.recomputed_jobs
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]


def test_tokens_are_those_of_several_ranks(llm: LLM, checkpoint: Path, tokenizer: Path) -> None:
    params = [bound(seed, temperature=0.0) for seed in range(3)]
    expected = llm.generate([PROMPT] * 3, params, progress=False)
    with small_engine(
        checkpoint, tokenizer, tensor_parallel_size=2, pipeline_parallel_size=2
    ) as parallel:
        found = parallel.generate([PROMPT] * 3, params, progress=False)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]


def test_max_tokens_and_stop_words_cut_an_answer_short(llm: LLM) -> None:
    cut, stopped = llm.generate(
        [PROMPT] * 2, [bound(1, max_tokens=3), bound(1, stop=("-",))], progress=False
    )
    assert re.fullmatch(r"\d\d\d", cut.text)
    assert cut.finish_reason is FinishReason.LENGTH
    assert re.fullmatch(r"\d{4}", stopped.text)
    assert stopped.finish_reason is FinishReason.STOP


def test_an_impossible_grammar_is_its_clients_mistake(llm: LLM) -> None:
    before = llm.engine.counters.refused
    params = SamplingParams(structured_output=StructuredOutput(regex="(a"))
    with pytest.raises(
        InvalidRequestError, match=r"structured_output.regex: got '\(a'; .*unclosed"
    ):
        llm.generate([PROMPT], params, progress=False)
    assert llm.engine.counters.refused == before + 1


def test_a_grammar_that_is_too_much_at_some_token_fails_its_job_alone(llm: LLM) -> None:
    ambiguous = StructuredOutput(grammar='start: (x{1,800}){1,800}\nx: "a" | "b"')
    params = [
        SamplingParams(
            max_tokens=250,
            structured_output=ambiguous,
            logit_bias=dict.fromkeys(EOS_TOKEN_IDS, -100.0),
            seed=0,  # with some other seeds an end token wins despite its bias
        ),
        bound(0),
    ]
    sinks = [Collector(), Collector()]
    for sink, one in zip(sinks, params, strict=True):
        llm.engine.submit("j", PROMPT, one, sink)
    failed, _ = [sink.wait() for sink in sinks]
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.error is not None
    assert failed.error.startswith("structured_output.grammar: ")
    check(sinks[1].text, params[1])


def test_a_job_is_cancelled_while_its_grammar_is_compiled(llm: LLM) -> None:
    factors = [{"type": "integer", "multipleOf": n} for n in (9973, 9967, 9949, 9941)]
    for_ever = StructuredOutput(json_schema={"allOf": factors})
    sink = Collector()

    def submit_and_cancel() -> None:
        """On the engine's thread, which reads no answer between the two."""
        number = llm.engine.submit("j", PROMPT, SamplingParams(structured_output=for_ever), sink)
        llm.engine.cancel(number)

    other = Trigger(1, submit_and_cancel)
    llm.engine.submit("other", PROMPT, SamplingParams(max_tokens=3, ignore_eos=True), other)
    assert other.wait().finish_reason is FinishReason.LENGTH
    assert sink.wait().finish_reason is FinishReason.CANCELLED


def test_biased_tokens_are_certain_or_impossible(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    (free,) = llm.generate([PROMPT], params, progress=False)
    first = free.token_ids[0]
    options = {"max_tokens": 8, "ignore_eos": True}
    forced, banned = llm.generate(
        [PROMPT] * 2,
        [
            SamplingParams(logit_bias={77: 100.0}, temperature=0.5, **options),
            SamplingParams(logit_bias={first: -100.0}, temperature=0, **options),
        ],
        progress=False,
    )
    assert forced.token_ids == [77] * 8
    assert first not in banned.token_ids
    with pytest.raises(InvalidRequestError, match="logit_bias: got 384; token ids are 0 to 383"):
        llm.generate([PROMPT], SamplingParams(logit_bias={384: 1.0}), progress=False)
