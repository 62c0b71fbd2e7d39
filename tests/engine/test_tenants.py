"""Tenants beside each other, through an engine with real ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from collector import Collector, Trigger
from engine_ranks import rank_hold
from fastserve_backend import LLM, SamplingParams
from fastserve_backend.errors import ConfigError, InvalidRequestError, TenantLimitError
from fastserve_backend.grammars.client import MAX_WAITING
from fastserve_backend.grammars.structured_output import StructuredOutput
from fastserve_backend.job import FinishReason, JobOutput, ServiceLevel
from live_engine import small_engine
from waiting import wait_for

pytestmark = pytest.mark.usefixtures("forked_ranks")

FLOOD, PERSON = ServiceLevel(tenant="flood"), ServiceLevel(tenant="person")
NUM_TOKENS = 20
SHORT = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)


class CountingCollector(Collector):
    """Also notes how many iterations had ended at each output.

    Args:
        on_end: called at the last output, on the engine's thread.
    """

    def __init__(self, llm: LLM, on_end: Callable[[], object]) -> None:
        super().__init__()
        self.iterations: list[int] = []
        self.num_before = 0
        """Iterations that had ended when the job was submitted."""
        self._counters = llm.engine.counters
        self._on_end = on_end

    def __call__(self, output: JobOutput) -> None:
        self.iterations.append(self._counters.iterations)
        super().__call__(output)
        if output.finish_reason is not None:
            self._on_end()


@pytest.mark.parametrize("options", [{}, {"policy": "fcfs"}, {"policy": "skip_join_mlfq"}], ids=str)
def test_a_flood_of_one_tenant_does_not_delay_another(
    checkpoint: Path, tokenizer: Path, llm: LLM, options: dict[str, object]
) -> None:
    prompts = [[5 + number, 7, 9] for number in range(5)]
    expected = [one.token_ids for one in llm.generate(prompts, SHORT, progress=False)]
    with small_engine(checkpoint, tokenizer, **options) as small:
        engine = small.engine
        persons: list[CountingCollector] = []

        def send_next() -> None:
            """On the engine's thread, so no iteration passes between the count and the job."""
            if len(persons) == len(prompts):
                return
            sink = CountingCollector(small, on_end=send_next)
            sink.num_before = engine.counters.iterations
            persons.append(sink)
            prompt = prompts[len(persons) - 1]
            engine.submit("person", prompt, SHORT, sink, service=PERSON)

        flood = [Trigger(1, send_next), *(Collector() for _ in range(29))]
        submit = partial(engine.submit, "flood", [5] * 20, LONG, service=FLOOD)
        with rank_hold(small) as hold:
            hold.stop()  # until the whole flood is here
            numbers = [submit(sink) for sink in flood]
        wait_for(lambda: len(persons) == len(prompts) and persons[-1].end is not None)
        for sink, tokens in zip(persons, expected, strict=True):
            assert sink.token_ids == tokens
            # One iteration may run already, and one may be sent behind it. A flood that was alone
            # is held back once it is charged for the next one.
            assert sink.iterations[0] - sink.num_before <= 4
            assert sink.iterations[-1] - sink.num_before <= NUM_TOKENS + 5
        for number in numbers:
            engine.cancel(number)
        assert all(sink.wait().finish_reason is not FinishReason.ERROR for sink in flood)


def test_a_tenant_at_its_limit_is_refused_and_others_are_served(
    checkpoint: Path, tokenizer: Path
) -> None:
    options = {"tenant_max_queued": 2, "tenant_tokens_per_minute": 100}
    with small_engine(checkpoint, tokenizer, **options) as llm:
        submit = llm.engine.submit
        sinks = [Collector() for _ in range(4)]
        with rank_hold(llm) as hold:
            hold.stop()
            for sink in sinks[:2]:
                submit("a", [5] * 10, LONG, sink, service=FLOOD)
            with pytest.raises(TenantLimitError, match="as many as it may; try again in 1 s"):
                submit("a", [5], LONG, Collector(), service=FLOOD)
        submit("b", [5] * 10, SHORT, sinks[2], service=PERSON)
        for sink in sinks[:3]:
            assert sink.wait().finish_reason is FinishReason.LENGTH
        with pytest.raises(TenantLimitError, match="has used its 100 tokens a minute") as refused:
            submit("a", [5], LONG, Collector(), service=FLOOD)
        assert 60 < refused.value.retry_after_s < 60 * (2 * 210 - 100 + 1) / 100
        submit("b", [5] * 10, SHORT, sinks[3], service=PERSON)
        sinks[3].wait()


def test_a_flood_of_grammars_is_no_queue_for_others(checkpoint: Path, tokenizer: Path) -> None:
    def asking(**wanted: object) -> SamplingParams:
        return SamplingParams(max_tokens=8, structured_output=StructuredOutput(**wanted))

    # Each is refused after a second of a processor.
    parts = [{"type": "integer", "multipleOf": number} for number in (9973, 9967, 9949, 9941)]
    with small_engine(checkpoint, tokenizer) as llm:
        engine = llm.engine
        flood = [Collector() for _ in range(MAX_WAITING)]
        numbers = [
            engine.submit(
                "flood",
                [5],
                asking(json_schema={"title": str(number), "allOf": parts}),
                sink,
                service=FLOOD,
            )
            for number, sink in enumerate(flood)
        ]
        person = Collector()
        engine.submit("person", [5], asking(choice=["yes", "no"]), person, service=PERSON)
        assert person.wait().finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        checked = [one for one in flood if one.end and "too complex" in (one.end.error or "")]
        refused = [one.end.refusal for one in flood if one.end and one not in checked]
        assert len(checked) < 4
        assert len(refused) >= MAX_WAITING // 5 - len(checked)
        assert all(isinstance(error, TenantLimitError) for error in refused)
        assert "grammars that may wait to be compiled; try again in 1 s" in str(refused[0])
        for number in numbers:
            engine.cancel(number)
        for sink in flood:
            sink.wait()


def test_only_tenants_of_the_file_are_served(
    checkpoint: Path, tokenizer: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("person:2:sk-1\nflood:sk-2\n")
    with small_engine(checkpoint, tokenizer, tenants_file=str(keys)) as llm:
        answers = llm.generate([[5], [6]], SHORT, service=[PERSON, FLOOD], progress=False)
        assert [len(one.token_ids) for one in answers] == [NUM_TOKENS] * 2
        with pytest.raises(InvalidRequestError, match="got 'nobody'; must be a name in"):
            llm.generate([5], SHORT, service=ServiceLevel(tenant="nobody"), progress=False)


def test_a_wrong_file_is_named_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("person:0:secret\n")
    with pytest.raises(
        ConfigError, match=r"^tenants.tenants_file: got '.*keys'; its line 1 must"
    ) as e:
        LLM("opt-125m", load_format="dummy", tenants_file=str(tmp_path / "keys"))
    assert "secret" not in str(e.value)
