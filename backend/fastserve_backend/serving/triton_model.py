"""The class that Triton's python backend calls, and the order in which a model starts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton_python_backend_utils as pb_utils
from fastserve_client.tracing import TracesError

from fastserve_backend.config import EngineConfig
from fastserve_backend.engine.rank_factory import RankFactory
from fastserve_backend.errors import FastServeError
from fastserve_backend.serving.guard import ParentGuard
from fastserve_backend.serving.reports import StubReports
from fastserve_backend.serving.repository import ENGINE_FILE
from fastserve_backend.serving.runtime import RuntimeDirectory
from fastserve_backend.system.lasting_imports import lasting_imports
from fastserve_backend.system.logs import log_to_stderr

if TYPE_CHECKING:
    from fastserve_backend.serving.model import ServedModel

logger = logging.getLogger(__name__)


class TritonPythonModel:
    """One model in its stub. ``execute`` runs on one thread and never raises."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model that ``engine.yaml`` in the model's directory names.

        Raises:
            pb_utils.TritonModelException: the model cannot be loaded; the message says why.
        """
        log_to_stderr()
        runtime = RuntimeDirectory.from_environment()
        self._reports: StubReports | None = None
        if runtime is not None:
            self._reports = runtime.own_reports()
            self._reports.start(args["model_name"])
            runtime.prepare_stub()
        self._guard = ParentGuard(runtime)
        try:
            self._model = _load(args, self._guard)
        except Exception as error:
            if not isinstance(error, (FastServeError, TracesError)):
                logger.exception("the model could not be loaded")
            reason = str(error) or repr(error)
            if self._reports is not None:
                self._reports.report_failure(reason)
            self._guard.on_failed_load()
            raise pb_utils.TritonModelException(reason) from None
        if self._reports is not None:
            self._reports.loaded.set()

    def execute(self, requests: list[Any]) -> None:
        """Accept or refuse each request. The responses come later."""
        self._model.execute(requests)

    def is_ready(self) -> bool:
        """Called by releases of Triton since 26.03."""
        return self._model.is_ready()

    def finalize(self) -> None:
        """Called when no request is left, or after the server's exit timeout."""
        logger.info("unloading")
        self._model.close()
        self._guard.close()
        if self._reports is not None:
            self._reports.withdraw()
        logger.info("unloaded")


def _load(args: dict[str, str], guard: ParentGuard) -> ServedModel:
    """Raises Exception: the model cannot be loaded; no rank is left."""
    config = EngineConfig.from_yaml(Path(args["model_repository"], ENGINE_FILE))
    rank_factory = RankFactory(config.parallel)
    try:
        # Imported while the ranks import torch, which takes several times as long.
        with lasting_imports():
            from fastserve_backend.serving.model import ServedModel

        return ServedModel(args["model_name"], args["model_version"], config, rank_factory, guard)
    except BaseException:
        rank_factory.close()
        raise
