"""Settings of all tests."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastserve_backend.system.lasting_imports import lasting_imports
from hypothesis import settings

# Not a conftest.py in tests/: that would put tests/ on the path, where tests/triton passes for the
# package triton if that is missing.
pytest_plugins = ("shared_server", "shared_gateway", "sharing", "matrices", "skips", "forked_ranks")

# An example's time depends more on the machine than on the code.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

# As in ranks: threads of torch that spin for long take the cores from other workers, and from the
# servers that are tested. OpenMP reads it when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

# To read all certificates of the system takes each new HTTP client 30 ms of processor time.
os.environ.setdefault(
    "SSL_CERT_FILE", str(Path(__file__).parent / "tests/support/tls/certificate.pem")
)

# A shell without job control starts background programs with Ctrl-C ignored, and what these start
# ignores it, too. Tests interrupt programs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Without a GPU, kernels in the Triton language run in its interpreter, or compiled on an emulator
# (see `ptx`). Triton reads the variable at its first import, which may be by a library that has
# nothing to do with the kernels.
if EMULATED_GPU := os.environ.get("EMULATED_GPU"):
    import ptx.driver

    ptx.driver.install(EMULATED_GPU)
elif not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Test modules import torch and transformers, which stay loaded for the whole session."""
    with lasting_imports():
        return (yield)


def pytest_collection_finish() -> None:
    """A process's first cosines are sometimes wrong by 1e-4 if several torch threads compute them
    (github.com/pytorch/pytorch/issues/188792). That would spoil references of tests."""
    if torch := sys.modules.get("torch"):
        torch.ones(1).cos()
        torch.ones(1).sin()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--endurance", action="store_true", help="the whole length of what `make test` has in short"
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the counts of the endurance tests as Markdown."""
    if not terminalreporter.config.getoption("--endurance"):
        return
    columns: tuple[str, ...] = ()
    for report in terminalreporter.getreports("passed"):
        if not report.user_properties:
            continue
        names, values = zip(*report.user_properties, strict=True)
        if names != columns:
            columns = names
            terminalreporter.write_line("| " + " | ".join(("test", *names)) + " |")
            terminalreporter.write_line("|---" * (len(names) + 1) + "|")
        test = report.nodeid.rpartition("::")[2]
        terminalreporter.write_line("| " + " | ".join((test, *map(str, values))) + " |")
