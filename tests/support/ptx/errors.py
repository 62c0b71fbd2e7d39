"""Errors of kernels on a GPU, and PTX unknown to this emulator."""

from __future__ import annotations


class MachineError(Exception):
    """The code does something that is undefined on a GPU, or that the GPU refuses."""


class UnknownCode(Exception):
    """PTX that no kernel used when this was written."""
