"""Cancellation, admission, draining, closing, and starts that fail."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path

import psutil
import pytest
from collector import Collector, Trigger
from engine_ranks import executor_of, held_job, rank_hold, rank_of
from fastserve_backend import LLM, SamplingParams
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.errors import ConfigError, DrainingError, OverloadedError
from fastserve_backend.job import FinishReason, JobOutput
from live_engine import small_engine, wait_until_free
from started_processes import RANK, has_ended, noting_processes
from waiting import DEADLINE_S, wait_for

LONG = SamplingParams(max_tokens=300, ignore_eos=True)


@pytest.mark.usefixtures("forked_ranks_here")
def test_cancelling_in_every_state_frees_everything(checkpoint: Path, tokenizer: Path) -> None:
    with small_engine(checkpoint, tokenizer) as llm:
        engine = llm.engine
        with rank_hold(llm) as hold:
            sinks = [Trigger(20, hold.stop), *(Collector() for _ in range(11))]
            numbers = [engine.submit(f"j{n}", [5] * 8, LONG, sink) for n, sink in enumerate(sinks)]
            hold.wait()
            # Running, preempted and waiting jobs, and an unknown one.
            for number in (*numbers, 10**9):
                engine.cancel(number)
                engine.cancel(number)
        for sink in sinks:
            assert sink.wait().finish_reason is FinishReason.CANCELLED
        wait_until_free(llm)
        assert sum(engine.snapshot().level_sizes) == 0
        assert engine.counters.finished["cancelled"] == 12
        (after,) = llm.generate([[5, 6]], SamplingParams(max_tokens=3), progress=False)
        assert after.finish_reason is not None


@pytest.mark.parametrize("name", ["with a space", "long" * 25])
def test_the_directory_for_temporary_files_may_have_any_name(
    checkpoint: Path, tokenizer: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
    with small_engine(checkpoint, tokenizer) as llm:
        (answer,) = llm.generate([[5, 6]], SamplingParams(max_tokens=3), progress=False)
        assert answer.finish_reason is not None


@pytest.mark.usefixtures("forked_ranks_here")
def test_a_full_queue_refuses_and_recovers(checkpoint: Path, tokenizer: Path) -> None:
    with small_engine(checkpoint, tokenizer, max_queued_requests=3) as llm:
        sinks = [Collector() for _ in range(3)]
        with rank_hold(llm) as hold:
            hold.stop()
            numbers = [llm.engine.submit("j", [5], LONG, sink) for sink in sinks]
            with pytest.raises(OverloadedError, match="3 requests are queued already"):
                llm.engine.submit("j", [5], LONG, Collector())
            for number in numbers:
                llm.engine.cancel(number)
        for sink in sinks:
            sink.wait()
        # There are more prompts than queue places: the offline class submits them as room appears.
        answers = llm.generate([[5]] * 9, SamplingParams(max_tokens=2), progress=False)
        assert all(answer.finish_reason is not None for answer in answers)


@pytest.mark.usefixtures("forked_ranks_here")
def test_draining_finishes_what_was_accepted(checkpoint: Path, tokenizer: Path) -> None:
    with small_engine(checkpoint, tokenizer) as llm:
        sinks = [Collector() for _ in range(6)]
        for sink in sinks:
            llm.engine.submit("j", [5], SamplingParams(max_tokens=30, ignore_eos=True), sink)
        assert llm.engine.drain(DEADLINE_S)
        for sink in sinks:
            assert sink.wait().finish_reason is FinishReason.LENGTH
            assert len(sink.token_ids) == 30
        with pytest.raises(DrainingError):
            llm.engine.submit("j", [5], LONG, Collector())


def has_news(llm: LLM) -> bool:
    """Whether somebody has told the engine something that it has not read."""
    return bool(select.select([llm.engine._inbox.descriptor], [], [], 0)[0])


def test_closing_cancels_what_runs_and_leaves_nothing_behind(
    checkpoint: Path, tokenizer: Path
) -> None:
    with small_engine(checkpoint, tokenizer) as llm:
        rank = rank_of(llm)
        directory = Path(executor_of(llm)._directory.name)  # type: ignore[union-attr]
        assert directory.stat().st_mode & 0o777 == 0o700
        with held_job(llm, LONG) as (_, sink):
            closing = threading.Thread(target=llm.close)
            closing.start()
            wait_for(lambda: has_news(llm) or sink.end is not None)
        closing.join()
        assert sink.wait().finish_reason is FinishReason.CANCELLED
        assert not rank.is_running()
        assert not directory.exists()
        llm.close()
        with pytest.raises(DrainingError):
            llm.engine.submit("j", [5], LONG, Collector())
        with pytest.raises(DrainingError):
            llm.engine.watch(1.0, lambda state: None)


def test_a_stop_signal_to_all_processes_leaves_the_ranks_to_the_engine(
    checkpoint: Path, tokenizer: Path
) -> None:
    with small_engine(checkpoint, tokenizer) as llm:
        rank = rank_of(llm)

        def stop_all() -> None:
            for number in (signal.SIGTERM, signal.SIGINT):
                rank.send_signal(number)

        sink = Trigger(1, stop_all)
        llm.engine.submit("j", [5], LONG, sink)
        assert sink.wait().finish_reason is FinishReason.LENGTH
        assert llm.engine.counters.worker_restarts == 0


@pytest.mark.usefixtures("forked_ranks_here")
def test_a_raising_sink_disturbs_nobody(checkpoint: Path, tokenizer: Path) -> None:
    def bad_sink(output: JobOutput) -> None:
        raise RuntimeError("client's trouble")

    with small_engine(checkpoint, tokenizer) as llm:
        good = Collector()
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        llm.engine.submit("bad", [5], params, bad_sink)
        llm.engine.submit("good", [5], params, good)
        assert good.wait().finish_reason is FinishReason.LENGTH
        assert llm.engine.drain(DEADLINE_S)


def test_ranks_end_when_the_engines_process_is_killed(checkpoint: Path, tokenizer: Path) -> None:
    code = (
        "import sys, threading; from fastserve_backend import LLM\n"
        f"llm = LLM({str(checkpoint)!r}, tokenizer={str(tokenizer)!r}, device_blocks=40)\n"
        "print('up', flush=True); threading.Event().wait()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        assert host.stdout.readline() == "up\n"
        # It is ready, so it has long become this program.
        (rank,) = [one for one in psutil.Process(host.pid).children() if RANK in one.cmdline()]
        os.kill(host.pid, signal.SIGKILL)
    wait_for(partial(has_ended, rank))


def test_weights_beyond_the_memory_are_refused(tmp_path: Path) -> None:
    fields = {"model_type": "opt", "hidden_size": 8192, "num_hidden_layers": 1000}
    fields |= {"ffn_dim": 32768, "num_attention_heads": 64, "word_embed_proj_dim": 8192}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    message = r"model\.model: the weights are \d+\.\d GiB on this host .* GiB of memory are free"
    with pytest.raises(ConfigError, match=message):
        LLM(str(tmp_path), load_format="dummy", device="cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_batched_tokens": 8, "max_num_seqs": 9}, "max_num_batched_tokens: got 8"),
        ({"max_model_len": 100000}, "max_model_len"),
        ({"device_blocks": 10**12}, "device_blocks: got 1000000000000"),
        ({"tokenizer": "/nowhere/tokenizer"}, "tokenizer"),
    ],
)
def test_what_cannot_start_says_why_and_leaves_nothing_behind(
    checkpoint: Path,
    options: dict[str, object],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with (
        noting_processes() as started,
        pytest.raises((ConfigError, ModelError), match=message),
    ):
        LLM(str(checkpoint), **({"load_format": "dummy"} | options))
    assert list(tmp_path.iterdir()) == []
    assert not started.left(RANK)
