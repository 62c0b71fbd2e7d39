"""Which of several servers a request goes to.

It decides and does nothing else: no I/O, no clock, only the standard library. ``router.Router`` is
the entrance. docs/replicas.md explains how a server is chosen.
"""
