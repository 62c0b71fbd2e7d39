"""A second host on one machine: the loopback interface, or a network namespace."""

from __future__ import annotations

import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from fastserve_backend.config import EngineConfig

SECRET = secrets.token_hex(32)
# Limit for processes to end after their engine or a signal.
END_TIMEOUT_S = 120.0
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
# Below the ports that Linux gives to whoever asks for any. So only another test that chooses the
# same number can take one of these.
CHOSEN_PORTS = range(12_000, 32_000)


@dataclass(frozen=True)
class OtherHost:
    engine_addr: str
    """The address of the engine's host, as both hosts see it."""
    run_there: tuple[str, ...] = ()
    """Words before each command that runs on the other host."""


def loopback() -> Iterator[OtherHost]:
    yield OtherHost("127.0.0.1")


def namespace() -> Iterator[OtherHost]:
    """A network namespace, connected to this one by a pair of virtual interfaces."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need `ip` and the rights of root")
    name, cable = f"fastserve-{os.getpid()}", f"fs{os.getpid()}"
    # Each has four addresses. Another test's would have to differ by 16384 process ids.
    subnet = f"10.213.{os.getpid() % 256}"
    first = 4 * (os.getpid() // 256 % 64)
    ours, theirs = f"{subnet}.{first + 1}", f"{subnet}.{first + 2}"
    commands = [
        f"link add {cable}a type veth peer name {cable}b netns {name}",
        f"addr add {ours}/30 dev {cable}a",
        f"link set {cable}a up",
        f"-n {name} addr add {theirs}/30 dev {cable}b",
        f"-n {name} link set {cable}b up",
        f"-n {name} link set lo up",
    ]
    added = _ip(f"netns add {name}")
    if added.returncode:
        pytest.skip(f"no network namespaces here: {added.stderr.strip()}")
    try:
        for command in commands:
            done = _ip(command)
            if done.returncode:
                pytest.skip(f"no cable between namespaces here: {done.stderr.strip()}")
        yield OtherHost(ours, ("ip", "netns", "exec", name))
    finally:
        _ip(f"netns del {name}")  # which removes the pair of interfaces, too


def _ip(arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments.split()], capture_output=True, text=True, timeout=10)


def free_ports(address: str) -> int:
    """The first of two neighbouring ports that nobody listens on."""
    while True:
        port = random.SystemRandom().choice(CHOSEN_PORTS)
        with suppress(OSError), ExitStack() as opened:
            for one in (port, port + 1):
                opened.enter_context(socket.create_server((address, one)))
            return port


@contextmanager
def running(
    host: OtherHost, command: list[str], log: Path, **variables: str
) -> Iterator[psutil.Popen]:
    """Runs a process on the other host, and ends it with all that it started."""
    environment = os.environ | {"GOMP_SPINCOUNT": "2000"} | variables
    with log.open("w") as output:
        process = psutil.Popen(
            [*host.run_there, *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        for one in [*family(process), process]:
            with suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGKILL)
        process.wait(END_TIMEOUT_S)


def torchrun(config: EngineConfig, *options: str) -> list[str]:
    """The documented torchrun command for the second host."""
    words = config.parallel.torchrun_command(1).split()
    return [*TORCHRUN, *options, *words[1:]]


def family(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return list(process.children(recursive=True))
    return []


def listening(processes: Iterable[psutil.Process]) -> set[tuple[str, int]]:
    """Addresses and ports at which these processes accept connections."""
    found = set()
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            for connection in one.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add((connection.laddr.ip, connection.laddr.port))
    return found
