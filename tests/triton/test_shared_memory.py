"""The server's Python backend shares memory with its stub, but not with other users.

That none is left at the end is part of what each test of the life cycle checks.
"""

from __future__ import annotations

from pathlib import Path

from fastserve_backend.serving.launch import TritonServer


def test_only_its_user_can_read_what_passes_through(server: TritonServer) -> None:
    prefix = server.runtime.shared_memory_prefix
    # Clients cannot register memory with such a name.
    assert prefix.startswith("triton_python_backend_shm_region_")
    regions = list(Path("/dev/shm").glob(f"{prefix}*"))
    assert regions
    assert {region.stat().st_mode & 0o777 for region in regions} == {0o600}
