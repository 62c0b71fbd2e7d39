"""Starts a tritonserver with one or several models, keeps it running, and leaves nothing behind."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

from fastserve_client.listening import is_loopback
from fastserve_client.protocol import (
    DEFAULT_GRPC_PORT,
    DEFAULT_HTTP_PORT,
    DEFAULT_METRICS_PORT,
    MODEL_NAME,
)

from fastserve_backend.checkpoints.hub import at_commit
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.config import EngineConfig
from fastserve_backend.config_sections import START_TIMEOUT_S as ENGINE_START_TIMEOUT_S
from fastserve_backend.errors import FastServeError
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_backend.serving.errors import LaunchError, ModelLoadError, PortInUseError
from fastserve_backend.serving.installation import TritonInstallation
from fastserve_backend.serving.liveness import LOOK_INTERVAL_S
from fastserve_backend.serving.process import ServerProcess
from fastserve_backend.serving.public_host import check_public_host
from fastserve_backend.serving.repository import ENGINE_FILE, write_model
from fastserve_backend.serving.runtime import RuntimeDirectory, wait_readable
from fastserve_backend.serving.served_models import divide_machine
from fastserve_backend.system.interpreter import child_environment
from fastserve_backend.system.restart_limit import RestartPauses

logger = logging.getLogger(__name__)

# Longer than the engine's own limit, because the engine can say what it waits for.
START_TIMEOUT_S = ENGINE_START_TIMEOUT_S + 60.0

# About one start in eighty aborts inside tritonserver 24.10, before it calls the model. Far fewer
# hang after that.
_START_TRIES = 3
# How long an interrupted download or conversion may take to clean up.
_FETCH_END_S = 3.0


class _Trouble(NamedTuple):
    """Why the server cannot go on."""

    reason: str
    kill: bool = True
    """End the server at once: without its stub it would wait in vain for the streams in flight."""
    is_final: bool = False
    """Another start would not help."""


class TritonServer:
    """A tritonserver that serves one or several models; a context manager that starts and stops it.

    When the server or a stub dies or hangs, or an engine breaks, the whole server is restarted:
    only this ends the streams of clients whose stub is gone. After three restarts in ten minutes
    the next ones come after growing pauses. When an engine has used up its own restarts, or a model
    cannot be loaded any more, the server is given up: it is ended, so that it does not claim to be
    ready, and ``wait`` returns 1.

    Port 0 is any free port; ``endpoints`` has its number after ``start``. Restarts keep it.

    Args:
        models: the configuration of the model ``fastserve``, or those of several models, by name.
            They share the machine as ``divide_machine`` says.
        log_path: file to which the server's output is appended; None: this process's stderr.
        model_repository: Triton models that are served beside these, such as ensembles.
        model_control: Clients that send the key in ``runtime.admin_key_file`` may load and unload
            models. A restarted server loads the models that were loaded.
        allow_old_triton: ``host`` may be an address that others reach although they can crash a
            tritonserver of this age.

    Raises:
        ConfigError: the models ask for more than the machine.
    """

    def __init__(
        self,
        models: EngineConfig | Mapping[str, EngineConfig],
        *,
        host: str = "127.0.0.1",
        http_port: int = DEFAULT_HTTP_PORT,
        grpc_port: int = DEFAULT_GRPC_PORT,
        metrics_port: int = DEFAULT_METRICS_PORT,
        log_path: Path | None = None,
        model_repository: Path | None = None,
        model_control: bool = False,
        allow_old_triton: bool = False,
    ) -> None:
        if isinstance(models, EngineConfig):
            models = {MODEL_NAME: models}
        self._models = divide_machine(models)
        self._to_load = list(models)
        self._backend_flags: list[str] = []
        self._model_repository = model_repository
        self._model_control = model_control
        self._allow_old_triton = allow_old_triton
        self._wanted = Endpoints(host, http_port, grpc_port, metrics_port)
        self._log_path = log_path
        self._endpoints: Endpoints | None = None
        # Until the server is stopped, or a restart could find that others have taken its ports.
        self._claimed = ExitStack()
        self._runtime: RuntimeDirectory | None = None
        self._new_server: (
            Callable[[Endpoints, Path | None, list[str], dict[str, str]], ServerProcess] | None
        ) = None
        self._server: ServerProcess | None = None
        self._supervisor: threading.Thread | None = None
        # Not an Event: a second signal may interrupt the first one's handler, which holds its lock.
        self._stopping = False
        self._hurrying = False
        self.is_fetching = False
        """Whether the model's files are being downloaded or converted."""
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._timeout_s = START_TIMEOUT_S
        self.failure: str | None = None
        """Why the server was given up; None while it runs or after ``stop``."""
        self.restarts = 0
        """How often the server was restarted and became ready."""

    @property
    def endpoints(self) -> Endpoints:
        if self._endpoints is None:
            raise LaunchError("the server has not been started")
        return self._endpoints

    @property
    def pid(self) -> int:
        """Process id of tritonserver; a restart changes it."""
        if self._server is None:
            raise LaunchError("the server is not running")
        return self._server.pid

    @property
    def runtime(self) -> RuntimeDirectory:
        if self._runtime is None:
            raise LaunchError("the server is not running")
        return self._runtime

    @property
    def stop_requested(self) -> bool:
        return self._stopping

    def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Returns when each model has generated a token.

        It downloads or converts the models' files first, so that the progress is visible here.
        ``timeout_s`` begins after that.

        Raises:
            ConfigError: ``tenants_file`` cannot be used.
            ModelError: there is no such model, or it cannot be fetched or read.
            PortInUseError: another process has one of the ports.
            OldTritonError: others reach ``host`` and can crash this tritonserver.
            ModelLoadError: a model refused its configuration or checkpoint, or generates nothing
                with it.
            LaunchError: ``model_control`` with a host that others reach; ``model_repository`` is no
                directory or has a model with the name of another; no tritonserver, no room for its
                files, or it did not become ready within ``timeout_s``.
        """
        self._check_options()
        self._timeout_s = timeout_s
        installation = TritonInstallation.find()
        with self._wanted.claim():  # a busy port shows before a long download
            check_public_host(self._wanted.host, installation, self._allow_old_triton)
        if any(config.model.device != "cuda" for config in self._models.values()):
            _start_build()
        self.is_fetching = True  # set first, so that a request to stop interrupts from now on
        try:
            if self._runtime is not None or self._stopping:
                raise LaunchError("a TritonServer starts once; make another one")
            # A restarted server has the same weights, even if others were pushed to the hub
            # meanwhile.
            self._models = {name: _fetched(config) for name, config in self._models.items()}
        finally:
            self.is_fetching = False
        try:
            self._prepare(installation)
            self._claim(self._wanted)
            self._launch(self._wanted)
        except BaseException:
            self._clean_up()
            raise
        self._supervisor = threading.Thread(
            target=self._supervise, name="fastserve-supervisor", daemon=True
        )
        self._supervisor.start()
        # A program that forgets to stop the server must still end, and cleanly.
        atexit.register(self.stop)

    def request_stop(self) -> None:
        """Ask for the end and return at once; for signal handlers. ``wait`` waits for the end."""
        self._stopping = True
        with suppress(OSError):  # it is stopped already
            self._wake_sender.send(b"x")

    def end_requests(self) -> None:
        """Let a stopping server end unfinished requests at once, with an error; for signal
        handlers."""
        self._hurrying = True

    def stop(self) -> None:
        """Drain, end all processes, and remove all files. Idempotent."""
        atexit.unregister(self.stop)
        if self._supervisor is not None:
            self.request_stop()
            self.wait()
        self._wake_sender.close()
        self._wake_receiver.close()

    def wait(self) -> int:
        """Wait until the server is stopped (returns 0) or given up (1; ``failure`` says why)."""
        if self._supervisor is not None:
            self._supervisor.join()
        return 0 if self.failure is None else 1

    def __enter__(self) -> TritonServer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _claim(self, wanted: Endpoints) -> None:
        """In place of a zero comes another port than before."""
        claimed = ExitStack()
        self._endpoints = claimed.enter_context(wanted.claim())
        self._claimed.close()
        self._claimed = claimed

    def _prepare(self, installation: TritonInstallation) -> None:
        try:
            self._runtime = RuntimeDirectory.create()
            for name, config in self._models.items():
                write_model(self._runtime.repository, name, config)
            self._backend_flags = installation.prepare_backends(self._runtime.backends)
        except OSError as error:
            made = error.filename if self._runtime is None else self._runtime.path
            where = "any directory for temporary files" if made is None else Path(made).parent
            raise LaunchError(
                f"cannot write the server's files to {where}: {error}; where that is full, free "
                "some space, or set TMPDIR to another directory with a short path"
            ) from None
        self._new_server = partial(
            ServerProcess,
            installation,
            self._runtime,
            loads_others=self._model_repository is not None and not self._model_control,
        )

    def _launch(self, wanted: Endpoints) -> None:
        """Uses the claimed ports. After a failed start, which may be due to them, it claims
        ``wanted`` again."""
        assert self._new_server is not None
        flags = self._backend_flags + self._model_flags()
        probe_tenants = {name: self._probe_tenant(name) for name in self._to_load}
        deadline = time.monotonic() + self._timeout_s
        for attempt in range(1, _START_TRIES + 1):
            self._server = self._new_server(self.endpoints, self._log_path, flags, probe_tenants)
            try:
                self._server.await_ready(deadline, lambda: self._stopping)
                return
            except ModelLoadError:
                raise
            except LaunchError as error:
                last_try = attempt == _START_TRIES or time.monotonic() > deadline
                if last_try or self._stopping:
                    raise
                logger.warning("start %d of %d failed: %s", attempt, _START_TRIES, error)
                self._retire(kill=False)
                self._claim(wanted)

    def _model_flags(self) -> list[str]:
        """Which models tritonserver loads, and whether others may be loaded later."""
        repositories = [f"--model-repository={path}" for path in self._repositories()]
        if not self._model_control:
            return [*repositories, "--model-control-mode=none"]
        loads = [f"--load-model={name}" for name in self._to_load]
        return [*repositories, "--model-control-mode=explicit", *loads]

    def _repositories(self) -> list[Path]:
        more = [] if self._model_repository is None else [self._model_repository]
        return [self.runtime.repository, *more]

    def _probe_tenant(self, name: str) -> str:
        """A tenant that the model knows. The operator may have changed the model's file."""
        for repository in self._repositories():
            if (file := repository / name / ENGINE_FILE).exists():
                return next(iter(EngineConfig.from_yaml(file).tenants.read_weights()), "")
        return ""

    def _supervise(self) -> None:
        try:
            self._keep_running()
        except FastServeError as error:
            if not self._stopping:
                logger.error("%s", error)
                self.failure = str(error)
        except Exception as error:
            logger.exception("the server cannot be supervised any more")
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            self._clean_up()

    def _keep_running(self) -> None:
        """Returns when a stop was asked for and the server has drained. Raises LaunchError: the
        server is given up."""
        pauses = RestartPauses()
        while (trouble := self._watch()) is not None:
            if trouble.is_final:
                raise LaunchError(trouble.reason)
            if self._model_control:
                assert self._server is not None
                self._to_load = sorted(self._server.stubs.models)
            if not self._restart(trouble, pauses):
                return
        assert self._server is not None
        self._server.drain(lambda: self._hurrying)

    def _restart(self, trouble: _Trouble, pauses: RestartPauses) -> bool:
        """Replace the server; tries again if a start fails, unless the next would fail alike.

        Returns:
            False: a stop was asked for meanwhile, and there is no server.

        Raises:
            ModelLoadError, PortInUseError: as ``start``.
        """
        while True:
            pause_s = pauses.take_pause(time.monotonic())
            when = f" in {pause_s:.0f} s" if pause_s else ""
            logger.error("%s; restarting the server%s", trouble.reason, when)
            self._retire(kill=trouble.kill)
            wait_readable(pause_s, self._wake_receiver.fileno())
            if self._stopping:
                return False
            began_s = time.monotonic()
            try:
                self._launch(self.endpoints)
            except (ModelLoadError, PortInUseError):
                raise
            except LaunchError as error:
                if self._stopping:
                    return False
                trouble = _Trouble(str(error), kill=False)
            else:
                self.restarts += 1
                return True
            finally:
                pauses.leave_out(time.monotonic() - began_s)

    def _watch(self) -> _Trouble | None:
        """Wait until the server is in trouble; None: a stop was asked for."""
        assert self._server is not None
        server, stubs = self._server.handle, self._server.stubs
        wake = self._wake_receiver.fileno()
        while True:
            stubs.update()
            ready = wait_readable(LOOK_INTERVAL_S, wake, server, *stubs.handles)
            if self._stopping:
                return None
            if server in ready:
                return _Trouble(f"tritonserver ended with code {self._server.exit_code}")
            if (name := stubs.ended_model()) is not None:
                return _Trouble(f"the process of {name} ended")
            for reports in stubs.reports:
                if (failure := reports.failure()) is not None:
                    reason = f"the engine of {reports.model()} failed: {failure}"
                    return _Trouble(reason, kill=False, is_final=reports.gave_up.is_set())
            if (hung := self._server.find_hung()) is not None:
                return _Trouble(hung)

    def _retire(self, *, kill: bool) -> None:
        if self._server is not None:
            self._server.stop(kill=kill)
            self._server = None

    def _clean_up(self) -> None:
        self._retire(kill=False)
        self._claimed.close()
        if self._runtime is not None:
            self._runtime.remove()
            self._runtime = None

    def _check_options(self) -> None:
        host, more = self._wanted.host, self._model_repository
        if self._model_control and not is_loopback(host):
            raise LaunchError(
                f"model-control: got it with the host {host}; who may load a model can run code "
                "here, and Triton would take the key unencrypted; use a loopback address"
            )
        if more is None:
            return
        if not more.is_dir():
            raise LaunchError(f"model-repository: got {more}, which is no directory")
        for name in self._models:
            if (more / name).exists():
                raise LaunchError(
                    f"model-repository: {more} has a model {name}, too; give the other a --name"
                )


def _fetched(config: EngineConfig) -> EngineConfig:
    """The configuration of the model as it is now, whose files are on this host afterwards."""
    model = config.model
    described = load_model_config(model.model, load_format=model.load_format)
    return config.with_keys(model=at_commit(model.model, described.directory))


def _start_build() -> None:
    """Compile the CPU's kernels, if they are not cached, while the server starts."""
    build = partial(
        subprocess.run,
        [sys.executable, "-m", "fastserve_kernels.cpu.builder"],
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    threading.Thread(target=build, name="kernel-build", daemon=True).start()


def serve(server: TritonServer, on_ready: Callable[[], None] = lambda: None) -> int:
    """Serve in the foreground until SIGTERM or SIGINT, then drain. SIGINT while it drains ends
    unfinished requests. Only for the main thread.

    Args:
        server: not started yet.

    Returns:
        0 after a signal, even during the start; 1 when the server was given up.

    Raises:
        ModelError, LaunchError: the server did not start.
    """

    def end_fetching() -> None:
        if server.is_fetching:
            os._exit(0)

    # A download waits for its connections even after an exception. The next start resumes it.
    end = threading.Timer(_FETCH_END_S, end_fetching)
    end.daemon = True

    def on_signal(number: int, frame: FrameType | None) -> None:
        is_first = not server.stop_requested
        server.request_stop()
        if not is_first and number == signal.SIGINT:
            server.end_requests()
        if is_first and server.is_fetching:  # fetching does not check for requests to stop
            end.start()
            raise KeyboardInterrupt

    stop_signals = (signal.SIGTERM, signal.SIGINT)
    previous = {number: signal.signal(number, on_signal) for number in stop_signals}
    try:
        server.start()
        on_ready()
        return server.wait()
    except (FastServeError, KeyboardInterrupt):
        if not server.stop_requested:
            raise
        return 0
    finally:
        end.cancel()
        server.stop()
        for number, handler in previous.items():
            signal.signal(number, handler)
