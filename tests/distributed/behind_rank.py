"""A rank on a CPU that answers as one on a GPU: by the thread that waits for the device."""

from __future__ import annotations

import sys

from fastserve_backend.rank_protocol.messages import StageDone, Step, StepResult
from fastserve_backend.worker.__main__ import main
from fastserve_backend.worker.model_runner import Answer, ModelRunner

FAILING_STEP = 99


class BehindRunner(ModelRunner):
    """Of one step the device fails only when its answer is waited for."""

    @property
    def runs_behind(self) -> bool:
        return True

    def launch(self, step: Step) -> Answer | None:
        return _fail if step.step_id == FAILING_STEP else super().launch(step)


def _fail() -> StepResult | StageDone:
    raise RuntimeError("the device has failed")


if __name__ == "__main__":
    from fastserve_backend.worker import worker

    worker.ModelRunner = BehindRunner  # type: ignore[misc]
    sys.exit(main())
