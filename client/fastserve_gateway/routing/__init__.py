"""Which of several servers a request goes to.

It decides and does nothing else: no I/O and no clock. ``router.Router`` is the entrance.
docs/replicas.md explains how a server is chosen.
"""
