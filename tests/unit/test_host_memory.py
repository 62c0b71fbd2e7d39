"""The memory that a container leaves to the ranks."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import psutil
import pytest
import torch
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.errors import ConfigError
from fastserve_backend.worker.host_limits import (
    check_swap_space,
    check_weights_fit,
    host_memory,
)

MIB = 2**20


def container(
    directory: Path, limit: str, swap_limit: str | None = "0", used: int = 100 * MIB
) -> Path:
    """Files as the kernel writes them. 30 MiB of the used memory are files."""
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(
        f"anon {used - 30 * MIB}\nfile {30 * MIB}\n"
        f"inactive_anon 0\nactive_file {10 * MIB}\ninactive_file {20 * MIB}\n"
    )
    if swap_limit is not None:
        (directory / "memory.swap.max").write_text(f"{swap_limit}\n")
        (directory / "memory.swap.current").write_text(f"{10 * MIB}\n")
    return directory


def test_a_limit_leaves_what_is_not_used_but_by_files(tmp_path: Path) -> None:
    memory = host_memory(container(tmp_path, limit=str(150 * MIB)))
    assert (memory.total, memory.available, memory.free_swap) == (150 * MIB, 80 * MIB, 0)


def test_a_limit_that_is_passed_leaves_nothing(tmp_path: Path) -> None:
    assert host_memory(container(tmp_path, limit=str(60 * MIB))).available == 0


@pytest.mark.parametrize("limit", ["max", str(2**60)])
def test_a_limit_above_the_hosts_memory_changes_nothing(limit: str, tmp_path: Path) -> None:
    memory = host_memory(container(tmp_path, limit, swap_limit=limit))
    assert memory.total == psutil.virtual_memory().total
    assert 100 * MIB < memory.available <= memory.total
    assert memory.free_swap <= psutil.swap_memory().total


@pytest.mark.parametrize("in_container", [False, True])
def test_without_limits_there_is_all(in_container: bool, tmp_path: Path) -> None:
    """All memory is available. Kernels without swap accounting have no file for its limit."""
    if in_container:
        container(tmp_path, "max", swap_limit=None)
    memory = host_memory(tmp_path)
    assert memory.total == psutil.virtual_memory().total
    assert memory.available > 100 * MIB


def test_weights_beyond_a_containers_limit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_model_config("opt-125m", load_format="dummy", dtype="float32")
    container(tmp_path, limit=str(400 * MIB))
    monkeypatch.setattr(
        "fastserve_backend.worker.host_limits.host_memory", lambda: host_memory(tmp_path)
    )
    with pytest.raises(ConfigError, match=r"where 0\.3 GiB of memory are free \(within"):
        check_weights_fit(config, num_ranks=1, num_local_ranks=1)


@pytest.mark.parametrize(
    ("device", "gib", "refused"),
    [("cuda", 0.07, False), ("cuda", 0.09, True), ("cpu", 0.09, False)],
)
def test_kv_blocks_on_the_host_take_no_more_than_what_is_left(
    device: str,
    gib: float,
    refused: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A GPU's are pinned at once. A CPU's are taken as they are used, so there is a warning."""
    caplog.set_level(logging.INFO)
    container(tmp_path, limit=str(150 * MIB))
    monkeypatch.setattr(
        "fastserve_backend.worker.host_limits.host_memory", lambda: host_memory(tmp_path)
    )
    left = r"0\.1 of the 0\.1 GiB of the host or its container are left"
    if refused:
        with pytest.raises(ConfigError, match=rf"swap_space_gib: got 0\.09; {left}, .* lower it"):
            check_swap_space(gib, torch.device(device), num_local_ranks=1)
        return
    check_swap_space(gib, torch.device(device), num_local_ranks=1)
    assert re.search(rf"{left}; KV blocks take {gib} GiB a rank", caplog.text)
    assert ("it may kill a rank that fills its blocks" in caplog.text) == (device == "cpu")
