"""Whether tritonserver may listen where others reach it."""

from __future__ import annotations

import logging

from fastserve_client.listening import is_loopback

from fastserve_backend.serving.errors import OldTritonError
from fastserve_backend.serving.installation import TritonInstallation

logger = logging.getLogger(__name__)


def check_public_host(host: str, installation: TritonInstallation, allow_old_triton: bool) -> None:
    """Warns of a host that others reach.

    Raises:
        OldTritonError: those others can crash the server, and ``allow_old_triton`` is not set.
        LaunchError: the server cannot be run.
    """
    if is_loopback(host):
        return
    release = installation.old_release()
    if release is not None and not allow_old_triton:
        raise OldTritonError(
            f"host: got {host} with tritonserver {release}, which any HTTP client can "
            "crash (CVE-2025-23310, CVE-2025-23311); listen on a loopback address and let others "
            "reach a gateway on this machine, or use NVIDIA's container of release 25.07 or later, "
            "or give --allow-old-triton if you trust everybody who reaches these ports"
        )
    logger.warning(
        "listening on %s without any authentication: whoever reaches these ports can use "
        "the server; put a gateway with API keys in front of it",
        host,
    )
