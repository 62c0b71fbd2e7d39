"""``fastserve profile``: measures iterations for a minute, then predicts others to compare."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from types import FrameType

from fastserve_bench.report.output import check_writable, write_json
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fastserve_backend.checkpoints.configured_model import load_configured_model
from fastserve_backend.config import EngineConfig
from fastserve_backend.config_sections import START_TIMEOUT_S
from fastserve_backend.errors import ConfigError
from fastserve_backend.executor.cluster import Cluster
from fastserve_backend.executor.distributed import DistributedExecutor
from fastserve_backend.profile.cache import cache_path, profiles_directory
from fastserve_backend.profile.fit import Sample
from fastserve_backend.profile.latency import LatencyProfile
from fastserve_backend.profile.measure import Measurement, ReadyRanks, measure_fully
from fastserve_backend.rank_protocol.messages import Setup
from fastserve_backend.system.clock import MonotonicClock

# Rows of the table of held-out iterations, from the smallest to the largest.
_SHOWN_ROWS = 10


def profile_command(config: EngineConfig, output: Path | None) -> None:
    """Measure on real ranks, print and write the result. Only for the main thread.

    The default of ``output`` is the cache, where the engine finds it at its next start. From now on
    SIGTERM ends the process like ``sys.exit``, so that no rank is left.

    Raises:
        ConfigError, ModelError: the configuration, the model or the cache cannot be used.
        WorkloadError: ``output`` cannot be written.
        EngineError: a rank died or was not ready in time.
    """
    if output is not None:
        check_writable("output", output)
    else:
        _check_cache()
    signal.signal(signal.SIGTERM, _exit)
    measurement = _measure(config)
    profile = measurement.profile
    if output is not None:
        write_json(output, profile.to_json())
    else:
        _keep(profile)
    console = Console(highlight=False, soft_wrap=True)
    _print(console, profile, measurement.held_out)
    console.print(f"written to {output or cache_path(profile.identity)}", markup=False)


def _check_cache() -> None:
    directory = profiles_directory()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            pass  # files can be written there
    except OSError as error:
        raise _unwritable(directory, error) from None


def _keep(profile: LatencyProfile) -> None:
    path = cache_path(profile.identity)
    try:
        profile.save(path)
    except OSError as error:  # for example, the disk is full now
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"output: got none, and cannot write to {path}: {error.strerror}; give --output FILE, or "
        "set XDG_CACHE_HOME to a directory that can be written to"
    )


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # as shells report it


def _measure(config: EngineConfig) -> Measurement:
    model = load_configured_model(config)
    cluster = Cluster.of(config.parallel)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    with ExitStack() as opened, bar:
        if cluster is not None:
            opened.callback(cluster.close)
        executor = DistributedExecutor(cluster)
        opened.callback(executor.close)
        task = bar.add_task(f"loading {model.name}", total=1.0)
        ready = executor.start(Setup.of(config, model.directory), START_TIMEOUT_S)
        bar.update(task, description=f"measuring {model.name}")
        ranks = ReadyRanks.of(model, config, ready, executor, MonotonicClock().now)
        return measure_fully(ranks, lambda share: bar.update(task, completed=share))


def _print(console: Console, profile: LatencyProfile, held_out: list[Sample]) -> None:
    identity = profile.identity
    weights = identity.shape.get("quantization", identity.dtype)
    console.print(
        f"[bold]{identity.model}[/], weights in {weights}, {identity.hardware}, "
        f"{profile.num_blocks} KV blocks of {identity.block_size} tokens"
    )
    table = Table("tokens", "of them decodes", "context", "predicted ms", "measured ms", "error")
    for column in table.columns:
        column.justify = "right"
    by_size = sorted(held_out, key=lambda sample: sample.seconds)
    step = max(1, -(-len(by_size) // _SHOWN_ROWS))
    for sample in by_size[::step]:
        load, predicted_s = sample.load, profile.iteration_s(sample.load)
        table.add_row(
            str(load.num_tokens),
            str(load.num_decodes),
            str(load.decode_context),
            f"{predicted_s * 1e3:.1f}",
            f"{sample.seconds * 1e3:.1f}",
            f"{(predicted_s / sample.seconds - 1) * 100:+.0f}%",
        )
    console.print(table)
    many = 256
    token_s = profile.tokens(2 * many) - profile.tokens(many)
    console.print(
        f"decode of one job {profile.decode_s(1) * 1e3:.1f} ms, "
        f"and {profile.decode_context_s * 1e6:.2f} ms for each 1000 positions of context\n"
        f"prompt of {many} tokens {profile.prefill_s(many) * 1e3:.1f} ms, "
        f"beyond that {token_s / many * 1e3:.3f} ms a token and "
        f"{profile.prefill_pair_s * 1e9:.2f} ms for each million pairs of tokens"
    )
    if profile.link.block_out_s:
        console.print(
            f"a KV block to the host {profile.link.block_out_s * 1e6:.0f} µs, "
            f"back {profile.link.block_in_s * 1e6:.0f} µs"
        )
    if profile.busy:
        console.print(
            "other processes used the machine meanwhile, so the times may be too long; the next "
            "start of the engine measures again"
        )
    if profile.held_out_error is not None:
        console.print(
            f"held-out iterations: mean absolute error {profile.held_out_error * 100:.1f}% "
            f"over {len(held_out)}, the fit is made from {profile.num_samples} others"
        )
