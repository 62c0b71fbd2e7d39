"""vLLM's OpenAI server as a process of its own, set up as its documentation recommends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

MODEL_NAME = "opt-125m"

_START_TIMEOUT_S = 900.0
"""Start limit: vLLM compiles at its first start, and without AVX-512 its warm-up in bfloat16 takes
minutes."""
_STOP_TIMEOUT_S = 30.0
ALL_CPUS = ",".join(map(str, sorted(os.sched_getaffinity(0))))
_POLL_S = 0.5
_PRELOADED = ("libtcmalloc_minimal.so.4", "libiomp5.so")


@dataclass(frozen=True, slots=True)
class VllmSettings:
    checkpoint: Path
    dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    kv_cache_gib: int
    threads_bind: str
    """Cores for its OpenMP threads, as VLLM_CPU_OMP_THREADS_BIND has them."""

    def arguments(self) -> list[str]:
        return [
            f"--model={self.checkpoint}",
            f"--served-model-name={MODEL_NAME}",
            f"--dtype={self.dtype}",
            f"--max-num-seqs={self.max_num_seqs}",
            f"--max-num-batched-tokens={self.max_num_batched_tokens}",
            f"--max-model-len={self.max_model_len}",
            # Prompts are random, so there are no prefixes to find.
            "--no-enable-prefix-caching",
            "--no-enable-log-requests",
            "--disable-uvicorn-access-log",
        ]

    def environment(self, directory: Path) -> dict[str, str]:
        """Variables to add to this process's environment; ``directory`` has the installation.

        Raises:
            FileNotFoundError: a library that should be preloaded is not there.
        """
        libraries = [directory / "lib" / name for name in _PRELOADED]
        for library in libraries:
            if not library.exists():
                raise FileNotFoundError(f"{library} is missing; run: vllm_cpu.sh setup")
        return {
            "LD_PRELOAD": ":".join(map(str, libraries)),
            "VLLM_CPU_OMP_THREADS_BIND": self.threads_bind,
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_cache_gib),
            "VLLM_CACHE_ROOT": str(directory / "compiled"),
            "TORCHINDUCTOR_CACHE_DIR": str(directory / "compiled" / "inductor"),
            # Otherwise it takes the machine's first address that is not loopback.
            "VLLM_HOST_IP": "127.0.0.1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            # It calls ninja, which lies there.
            "PATH": f"{directory / 'bin'}:{os.environ['PATH']}",
        }


class VllmServer:
    """A context manager that starts and stops it; ``url`` is the base URL of its OpenAI API.

    Args:
        directory: virtual environment into which vLLM is installed.
        log_path: file for its output.

    Raises:
        RuntimeError: on entering, it ended or was not ready in time. The message names its log.
    """

    def __init__(self, directory: Path, settings: VllmSettings, log_path: Path) -> None:
        self._directory = directory
        self._settings = settings
        self._log_path = log_path
        self._log: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    @property
    def pid(self) -> int:
        """Process id of the HTTP server, whose children compute."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> VllmServer:
        self._port = _free_port()
        self._log = self._log_path.open("wb")
        # Not the script "vllm", which looks for a package of that name and finds only vllm-cpu.
        command = [str(self._directory / "bin" / "python"), "-m"]
        command += [
            "vllm.entrypoints.openai.api_server",
            "--host=127.0.0.1",
            f"--port={self._port}",
        ]
        self._process = subprocess.Popen(
            command + self._settings.arguments(),
            env=os.environ | self._settings.environment(self._directory),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            # A process group of its own, so that no child outlives this process.
            start_new_session=True,
        )
        try:
            self._wait_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()

    def _wait_ready(self) -> None:
        assert self._process is not None
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not self._is_ready():
            if self._process.poll() is not None:
                raise RuntimeError(
                    f"vLLM ended with code {self._process.returncode}; see {self._log_path}"
                )
            if time.monotonic() > deadline_s:
                raise RuntimeError(
                    f"vLLM was not ready within {_START_TIMEOUT_S:.0f} s; see {self._log_path}"
                )
            time.sleep(_POLL_S)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/models", timeout=_POLL_S) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_STOP_TIMEOUT_S)
            finally:
                _kill_group(self._process.pid)
                self._process.wait()
        if self._log is not None:
            self._log.close()


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError):  # all have ended
        os.killpg(leader, signal.SIGKILL)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port
