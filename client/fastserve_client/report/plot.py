"""A sweep as a figure: latency over rate, as in FastServe's Fig. 11 and 12."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fastserve_client.errors import WorkloadError
from fastserve_client.report.sweep import SweepPoint

_FORMATS = {".png": "png", ".svg": "svg"}
_SIZE_INCHES = (9.0, 3.8)
_DOTS_PER_INCH = 150


def plot_sweep(
    points: Sequence[SweepPoint],
    path: str | Path,
    *,
    slo_s: float | None = None,
    title: str | None = None,
) -> None:
    """Writes mean (left) and P95 (right) normalized latency over the rate, one line a label.

    The same points make the same file, byte for byte, with one matplotlib and its settings.

    Args:
        path: Ends in ``.png`` or ``.svg``.
        slo_s: The objective, as a horizontal line.

    Raises:
        WorkloadError: no points, another ending, a path that cannot be written, or no matplotlib.
    """
    path = Path(path)
    file_format = _FORMATS.get(path.suffix.lower())
    if file_format is None:
        raise WorkloadError(f"path: got {str(path)!r}; must end in {' or '.join(_FORMATS)}")
    if not points:
        raise WorkloadError("points: got none; a figure needs at least one")
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator
    except ImportError:
        raise WorkloadError(
            "matplotlib: got no such package; figures need it: pip install 'fastserve-triton[plot]'"
        ) from None

    # Without pyplot there is no global state, no window and no choice of backend: Figure renders
    # PNG with Agg and SVG with the SVG backend, whatever the user's settings say.
    figure = Figure(figsize=_SIZE_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
    mean_axes, p95_axes = figure.subplots(1, 2, sharex=True, sharey=True)
    for label in dict.fromkeys(point.label for point in points):
        line = sorted((p for p in points if p.label == label), key=lambda p: p.rate)
        rates = [p.rate for p in line]
        latencies = [p.summary.normalized_latency_s for p in line]
        mean_axes.plot(rates, [latency.mean for latency in latencies], marker="o", label=label)
        p95_axes.plot(rates, [latency.p95 for latency in latencies], marker="o", label=label)
    for axes, statistic in ((mean_axes, "Mean"), (p95_axes, "P95")):
        if slo_s is not None:
            axes.axhline(slo_s, color="black", linestyle="--", label=f"SLO {slo_s:g} s/token")
        axes.set_title(statistic)
        axes.set_yscale("log")
        # Latencies span few powers of ten: 0.1, 0.2, 0.5, 1 … say more than those alone.
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.set_xlim(left=0)
        axes.set_xlabel("Rate (jobs/s)")
        axes.grid(alpha=0.3)
    mean_axes.set_ylabel("Normalized latency (s/token)")
    mean_axes.legend()
    if title is not None:
        figure.suptitle(title)
    # SVG files hold a date and random ids unless told otherwise.
    metadata = {"Date": None} if file_format == "svg" else {}
    try:
        with matplotlib.rc_context({"svg.hashsalt": "fastserve"}):
            figure.savefig(path, format=file_format, metadata=metadata)
    except OSError as error:
        raise WorkloadError(
            f"path: got {str(path)!r} ({error.strerror}); must be a file that can be written"
        ) from None
