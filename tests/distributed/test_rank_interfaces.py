"""The network interface on which a rank's libraries listen for other ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
JOIN = f"""
import os, sys
from pathlib import Path
import torch
from fastserve_backend.worker.groups import join_process_group
join_process_group(torch.device("cpu"), Path(sys.argv[1]), "")
print(*map(os.environ.get, {VARIABLES}))
"""


@pytest.mark.parametrize(
    ("own", "expected"), [({}, "lo =lo"), ({"NCCL_SOCKET_IFNAME": "eth7"}, "lo eth7")]
)
def test_ranks_of_one_host_meet_on_loopback(
    own: dict[str, str], expected: str, tmp_path: Path
) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    joined = subprocess.run(
        [sys.executable, "-c", JOIN, str(tmp_path / "ranks")],
        env=environment | place | own,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert joined.stdout.strip() == expected, joined.stderr
