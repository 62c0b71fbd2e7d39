"""The servers of one model: who takes requests, and how each job gets to one that does.

``fleet.Fleet`` is the entrance. What it chooses by is in ``fastserve_gateway.routing``.
"""
