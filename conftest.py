"""What holds for all tests."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import settings

# How long an example takes says more of the machine than of the code.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

# Without a GPU, kernels in the Triton language run in its interpreter. The package reads this when
# it is first imported, which may be by a library that has nothing to do with the kernels.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
