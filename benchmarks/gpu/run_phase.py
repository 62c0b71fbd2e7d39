"""One phase of the check, in a process that check.py starts. So a failure, even an illegal access
on the device, ends this phase alone."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

from benchmarks.gpu.check_device import find_device
from benchmarks.gpu.phase_context import CheckFailed, Context, Recorder, one_line

FAILED, NO_DEVICE = 1, 3
"""Exit codes."""
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module", help="whose run() is the phase")
    parser.add_argument("--parent", type=int, required=True, help="process id of check.py")
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    # If check.py is killed, this process must not go on to use the device beside the next run.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != arguments.parent:  # it was killed during the imports above
        return FAILED
    started_s = time.monotonic()
    recorder = Recorder(arguments.records)
    try:
        device = find_device(tiny=arguments.tiny)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        recorder.error(one_line(error))
        return NO_DEVICE
    recorder.machine(device.describe())
    context = Context(
        device, recorder, started_s + arguments.seconds, arguments.scratch, arguments.dataset
    )
    try:
        import_module(arguments.module).run(context)
    except CheckFailed as error:
        recorder.error(str(error))
        return FAILED
    except Exception as error:
        traceback.print_exc()
        recorder.error(one_line(error))
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
