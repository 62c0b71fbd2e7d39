"""What goes wrong on a GPU, and what this emulator does not know."""

from __future__ import annotations


class MachineError(Exception):
    """The code does what is undefined on a GPU, or what it refuses."""


class UnknownCode(Exception):
    """PTX that the kernels had none of when this was written."""
