"""The threads of ranks, and which core each one keeps."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from fastserve_backend.system.cores import ALLOWED_CORES, num_cores

# A third of three cores is one core, whatever the last bit of a float says.
_ROUNDING = 1e-6
_BINDING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
_log = logging.getLogger(__name__)


def num_threads(host_share: float, num_local_ranks: int) -> int:
    """Threads of each rank of a model that has a share of the cores."""
    return max(1, int(num_cores() * host_share / num_local_ranks + _ROUNDING))


def cores_to_keep(
    num_threads: int, local_rank: int, num_local_ranks: int, allowed: Sequence[int] = ALLOWED_CORES
) -> Sequence[int]:
    """A core for each thread of a rank, if the threads of all ranks of this host take all cores.
    Empty: it is better that Linux chooses, as a thread can then go to a core that is free."""
    if num_threads * num_local_ranks != len(allowed):
        return ()
    return allowed[local_rank * num_threads :][:num_threads]


def keep_cores(threads: Sequence[int]) -> None:
    """Keep each of this rank's threads on a core of its own, where `cores_to_keep` says so and the
    user has not told OpenMP what to do.

    A step ends when all threads have done their part. Other threads of the server wake often, and
    Linux then puts two threads of a rank on one core while another one idles.

    Args:
        threads: Linux's ids.
    """
    if any(name in os.environ for name in _BINDING_VARIABLES):
        return
    place, num_places = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    try:
        for thread, core in zip(
            threads, cores_to_keep(len(threads), place, num_places), strict=False
        ):
            os.sched_setaffinity(thread, {core})
    except OSError as error:
        _log.warning("the rank's threads do not keep their cores: %s", error)
