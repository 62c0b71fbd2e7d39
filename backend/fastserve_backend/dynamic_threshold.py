"""How much of a shared queue one tenant may hold: a dynamic threshold.

Choudhury and Hahne, Dynamic Queue Length Thresholds for Shared-Memory Packet Switches, IEEE/ACM
Transactions on Networking 6 (2), 1998.
"""

from __future__ import annotations

# One tenant that floods a queue holds 4/5 of it then, and the rest stays free.
_PLACES_A_FREE_PLACE = 4


def may_take_place(num_held: int, num_free: int, share: float) -> bool:
    """Whether a tenant gets another place in a queue: only if ``num_held < 4 · share · num_free``.

    Two things follow:

    * A tenant without a place gets one unless the queue is full.
    * A tenant with n places leaves at least n / 4 - 1 places free when it gets another one. So none
      with 4 places or more takes the last one.

    Args:
        num_held: places that it has.
        num_free: places that nobody has.
        share: its weight over the weights of all tenants with places, itself included; at most 1.
    """
    if num_held == 0:
        return num_free > 0
    return num_held < _PLACES_A_FREE_PLACE * share * num_free
