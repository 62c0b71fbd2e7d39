"""The server's Python backend shares memory with its stub, but not with other users."""

from __future__ import annotations

from pathlib import Path

from fastserve_backend.config import EngineConfig
from running_server import running_server
from tiny_model import engine_options


def test_only_its_user_can_read_what_passes_through(tiny_model: Path, tmp_path: Path) -> None:
    config = EngineConfig().with_keys(**engine_options(tiny_model))
    with running_server(config, tmp_path / "server.log") as server:
        prefix = server.runtime.shared_memory_prefix
        # Clients cannot register memory with such a name.
        assert prefix.startswith("triton_python_backend_shm_region_")
        regions = list(Path("/dev/shm").glob(f"{prefix}*"))
        assert regions
        assert {region.stat().st_mode & 0o777 for region in regions} == {0o600}
    assert not list(Path("/dev/shm").glob(f"{prefix}*"))
