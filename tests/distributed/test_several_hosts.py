"""Ranks on two hosts: the second is a namespace or the loopback. All processes are real."""

from __future__ import annotations

import logging
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
from array import array
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import hosts
import psutil
import pytest
import zmq
from fastserve_backend import LLM, SamplingParams
from fastserve_backend.config import EngineConfig
from fastserve_backend.engine.engine import Engine
from fastserve_backend.errors import ConfigError
from fastserve_backend.executor.cluster import Cluster
from fastserve_backend.job import JobOutput
from fastserve_backend.rank_protocol.messages import CopyBlocks, Stop, encoder
from hosts import (
    END_TIMEOUT_S,
    SECRET,
    OtherHost,
    family,
    free_ports,
    listening,
    running,
    torchrun,
)
from parallel_models import VOCAB_SIZE, ParallelLLM
from started_processes import has_ended
from waiting import wait_for

GREEDY = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
NUM_JOBS = 6
# Limit for a rank to import torch and to be refused.
REFUSED_TIMEOUT_S = 120.0
# Limit for torchrun to start a rank anew, and for all jobs to end.
RESTART_S = 150.0
RANK = [sys.executable, "-m", "fastserve_backend.worker", "--engine"]
# An engine's side of the ranks without an engine. It prints when they have connected.
EXECUTOR = """
import sys
from pathlib import Path
from fastserve_backend.config import EngineConfig
from fastserve_backend.executor.cluster import Cluster
from fastserve_backend.executor.distributed import DistributedExecutor
from fastserve_backend.rank_protocol.messages import Setup
config = EngineConfig.from_yaml(Path(sys.argv[1]))
executor = DistributedExecutor(Cluster.of(config.parallel))
executor.start(Setup.of(config), 150.0)
print("ready", flush=True)
while True:
    executor.check()
    sys.stdin.readline()
"""

# A rank that stays in a step until told to go on, and pings often.
BUSY_RANK = """
import sys
from fastserve_backend.rank_protocol import cluster_keys
from fastserve_backend.worker.engine_link import EngineLink, send_function
from fastserve_backend.rank_protocol.messages import Heartbeat, Stop
cluster_keys.PING_MS, cluster_keys.PONG_TIMEOUT_MS = 100, 2500
link = EngineLink(sys.argv[1], 1)
send_function(link.main)(Heartbeat())
sys.stdin.readline()
num_taken = 0
while not isinstance(link.receive(), Stop):
    num_taken += 1
link.stopped.set()
print(num_taken)
"""


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(9)
    return [
        [rng.randrange(4, VOCAB_SIZE) for _ in range(rng.randint(1, 50))] for _ in range(NUM_JOBS)
    ]


@pytest.fixture(scope="module")
def one_rank(small_opt: Path, tokenizer: Path, prompts: list[list[int]]) -> list[list[int]]:
    with ParallelLLM(small_opt, tokenizer, 1, 1) as llm:
        return [answer.token_ids for answer in llm.generate(prompts, GREEDY, progress=False)]


@pytest.fixture(params=["loopback", "namespace"])
def other_host(request: pytest.FixtureRequest) -> Iterator[OtherHost]:
    yield from getattr(hosts, request.param)()


class ConfiguredLLM(LLM):
    def __init__(self, config: EngineConfig) -> None:
        self.engine = Engine(config, check_integrity=True)


def config_of(model: Path, tokenizer: Path, address: str, **keys: Any) -> EngineConfig:
    return EngineConfig().with_keys(
        model=str(model),
        tokenizer=str(tokenizer),
        dtype="float32",
        device="cpu",
        device_blocks=60,
        swap_space_gib=0.05,
        max_num_seqs=4,
        nnodes=2,
        master_addr=address,
        master_port=free_ports(address),
        **keys,
    )


def is_rank(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return "RANK" in process.environ() and "fastserve_backend.worker" in process.cmdline()
    return False


@contextmanager
def intruder(
    host: OtherHost, config: EngineConfig, log: Path, **secret: str
) -> Iterator[psutil.Popen]:
    """A process that tries to take the second rank's place."""
    address = f"tcp://{config.parallel.master_addr}:{config.parallel.engine_port}"
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with running(host, [*RANK, address], log, **variables, **secret) as process:
        yield process


def test_jobs_run_on_two_hosts_and_outlive_a_remote_rank(
    other_host: OtherHost,
    small_opt: Path,
    tokenizer: Path,
    prompts: list[list[int]],
    one_rank: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stages = 2 if other_host.run_there else 1
    sizes = {"pipeline_parallel_size": stages, "tensor_parallel_size": 2 // stages}
    config = config_of(small_opt, tokenizer, other_host.engine_addr, **sizes)
    monkeypatch.setenv("FASTSERVE_CLUSTER_SECRET", SECRET)
    caplog.set_level(logging.INFO)
    if other_host.run_there:  # a supervisor starts torchrun again
        command = ["sh", "-c", f"until {shlex.join(torchrun(config))}; do :; done"]
    else:
        command = torchrun(config, "--max-restarts", "3")
    secret = {"FASTSERVE_CLUSTER_SECRET": SECRET}
    log, wrong_log = tmp_path / "torchrun.log", tmp_path / "wrong.log"
    # Of engines that other tests share.
    others, not_ours = family(psutil.Process()), listening([psutil.Process()])

    def own_processes() -> list[psutil.Process]:
        return [one for one in family(psutil.Process()) if one not in others]

    with (
        running(other_host, command, log, **secret) as remote,
        ConfiguredLLM(config) as llm,
        intruder(other_host, config, wrong_log, FASTSERVE_CLUSTER_SECRET=SECRET[::-1]) as wrong,
    ):
        ours = listening([psutil.Process(), *own_processes()]) - not_ours
        assert {address for address, _ in ours} == {other_host.engine_addr}
        (rank,) = [one for one in family(remote) if is_rank(one)]
        outputs: list[list[JobOutput]] = [[] for _ in prompts]

        def sink(of_job: list[JobOutput], output: JobOutput) -> None:
            of_job.append(output)
            if sum(map(len, outputs)) == 30:
                rank.kill()

        for number, prompt in enumerate(prompts):
            llm.engine.submit(f"job-{number}", prompt, GREEDY, partial(sink, outputs[number]))
        wait_for(lambda: all(job and job[-1].finish_reason for job in outputs), RESTART_S)
        tokens = [[token for one in job for token in one.token_ids] for job in outputs]
        assert tokens == one_rank
        assert llm.engine.counters.worker_restarts == 1
        assert "rank 1 is gone: its connection closed; restarting the ranks" in caplog.text
        assert wrong.wait(REFUSED_TIMEOUT_S) == 2
        assert (
            "refuses this rank: FASTSERVE_CLUSTER_SECRET is not the engine's"
            in wrong_log.read_text()
        )
        again = llm.generate(prompts[:1], GREEDY, progress=False)
        assert again[0].token_ids == one_rank[0]
        assert llm.engine.counters.worker_restarts == 1
        ranks = [one for one in own_processes() if is_rank(one)]
        assert len(ranks) == 2
        llm.close()
        wait_for(lambda: all(map(has_ended, ranks)), END_TIMEOUT_S)
        if not other_host.run_there:
            assert remote.wait(END_TIMEOUT_S) == 0, log.read_text()
    assert SECRET not in caplog.text + log.read_text() + wrong_log.read_text()


@pytest.mark.parametrize("loss", [signal.SIGKILL, signal.SIGSTOP])
def test_ranks_end_when_the_engine_is_gone_or_does_not_answer(
    loss: signal.Signals, small_opt: Path, tokenizer: Path, tmp_path: Path
) -> None:
    host = OtherHost("127.0.0.1")
    config = config_of(small_opt, tokenizer, host.engine_addr, tensor_parallel_size=2)
    yaml = tmp_path / "engine.yaml"
    yaml.write_text(config.to_yaml())
    environment = os.environ | {"FASTSERVE_CLUSTER_SECRET": SECRET}
    engine = psutil.Popen(
        [sys.executable, "-c", EXECUTOR, str(yaml)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    log = tmp_path / "torchrun.log"
    with running(host, torchrun(config), log, FASTSERVE_CLUSTER_SECRET=SECRET) as remote:
        try:
            assert engine.stdout is not None
            assert engine.stdout.readline() == b"ready\n"
            others = [*family(engine), *family(remote)]
            assert sum(map(is_rank, others)) == 2
            engine.send_signal(loss)
            wait_for(lambda: all(map(has_ended, family(remote))), END_TIMEOUT_S)
        finally:
            engine.send_signal(signal.SIGKILL)
            engine.wait(END_TIMEOUT_S)
        wait_for(lambda: all(map(has_ended, others)), END_TIMEOUT_S)
        assert remote.wait(END_TIMEOUT_S) == 1
    assert f"the engine at tcp://127.0.0.1:{config.parallel.engine_port} is gone" in log.read_text()


def test_a_rank_that_is_far_behind_keeps_its_connection(
    small_opt: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTSERVE_CLUSTER_SECRET", SECRET)
    config = config_of(small_opt, tokenizer, "127.0.0.1", tensor_parallel_size=2)
    blocks = array("i", [0]).tobytes()
    with closing(Cluster(config.parallel)) as cluster, zmq.Context() as context:
        engine = context.socket(zmq.ROUTER)
        engine.set_hwm(0)
        authenticator = cluster.bind(engine)
        rank = subprocess.Popen(
            [sys.executable, "-c", BUSY_RANK, cluster.engine_address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert engine.poll(REFUSED_TIMEOUT_S * 1000)
            identity, _ = engine.recv_multipart()
            for number in range(5000):
                copy = CopyBlocks(number, True, blocks, blocks, 16)
                engine.send_multipart([identity, encoder.encode(copy)])
            engine.send_multipart([identity, encoder.encode(Stop())])
            with pytest.raises(subprocess.TimeoutExpired):  # it ends 4 s after its last pong
                rank.wait(5)
            output, _ = rank.communicate("go on\n", timeout=REFUSED_TIMEOUT_S)
            assert (rank.returncode, output) == (0, "5000\n")
        finally:
            rank.kill()
            rank.wait()
            engine.close()
            authenticator.stop()


def test_nothing_starts_without_a_secret(
    small_opt: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(small_opt, tokenizer, "127.0.0.1", tensor_parallel_size=2)
    with intruder(OtherHost("127.0.0.1"), config, tmp_path / "log") as rank:
        for secret, problem in ((None, "is not set"), ("short", "has 5 characters")):
            if secret is not None:
                monkeypatch.setenv("FASTSERVE_CLUSTER_SECRET", secret)
            with pytest.raises(ConfigError, match=f"{problem}; .*`openssl rand -hex 32`"):
                ConfiguredLLM(config)
        assert rank.wait(REFUSED_TIMEOUT_S) == 2
    assert "FASTSERVE_CLUSTER_SECRET is not set" in (tmp_path / "log").read_text()


def test_a_taken_port_is_named(
    small_opt: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTSERVE_CLUSTER_SECRET", SECRET)
    config = config_of(small_opt, tokenizer, "127.0.0.1", tensor_parallel_size=2)
    for port in (config.parallel.master_port, config.parallel.engine_port):
        with (
            socket.create_server(("127.0.0.1", port)),
            pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address already"),
        ):
            ConfiguredLLM(config)
