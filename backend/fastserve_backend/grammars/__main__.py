"""``python -m fastserve_backend.grammars``: the process that checks outputs, a helper of the
engine."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from fastserve_backend.grammars.messages import to_grammars_decoder
from fastserve_backend.grammars.process import GrammarLoop
from fastserve_backend.system.helper_process import connect_to_engine


def main() -> int:
    engine = connect_to_engine(to_grammars_decoder)
    # Where memory runs out, the kernel kills this process first: another can take its place, and no
    # job is lost.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    with contextlib.suppress(OSError):  # the engine is gone
        GrammarLoop(engine).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
