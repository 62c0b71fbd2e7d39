"""A rank on a CPU that answers as a rank on a GPU does: from the thread that waits for the
device."""

from __future__ import annotations

import sys

from fastserve_backend.rank_protocol.messages import Step
from fastserve_backend.worker.__main__ import main
from fastserve_backend.worker.model_runner import LaunchedStep, ModelRunner, Stopwatch

FAILING_STEP = 99


class BehindRunner(ModelRunner):
    """One step fails on the device, which shows only when its answer is awaited."""

    @property
    def is_asynchronous(self) -> bool:
        return True

    def launch(self, step: Step) -> LaunchedStep | None:
        if step.step_id != FAILING_STEP:
            return super().launch(step)
        return LaunchedStep(step.step_id, FailingWatch(self.device), None, is_last_stage=True)


class FailingWatch(Stopwatch):
    def seconds(self) -> float:
        raise RuntimeError("the device has failed")


if __name__ == "__main__":
    from fastserve_backend.worker import build_rank

    build_rank.ModelRunner = BehindRunner  # type: ignore[misc]
    sys.exit(main())
