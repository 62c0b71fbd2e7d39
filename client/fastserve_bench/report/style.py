"""What all figures share: colours, type sizes, and how they are written to a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastserve_client.errors import WorkloadError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, for the colour-blind, without its yellow, which is too pale for lines.
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
SKY, AMBER, GREY, LIGHT_GREY = "#56B4E9", "#E69F00", "#555555", "#BBBBBB"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, AMBER, SKY, GREY)
# A marker for each line, for print without colours.
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DOTS_PER_INCH = 200

_FORMATS = {".png": "png", ".svg": "svg"}
# Readable if a figure of two panels fills the width of a page.
_STYLE: Any = {
    "font.size": 9,
    "figure.titlesize": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "svg.hashsalt": "fastserve",  # without it SVG files have random ids
}


def check_path(path: str | Path) -> Path:
    """Raises WorkloadError if the ending is wrong, or there is no matplotlib."""
    path = Path(path)
    if path.suffix.lower() not in _FORMATS:
        raise WorkloadError(f"path: got {str(path)!r}; must end in {' or '.join(_FORMATS)}")
    if find_spec("matplotlib") is None:
        raise WorkloadError(
            "matplotlib: got no such package; figures need it: pip install 'fastserve-triton[plot]'"
        )
    return path


@contextmanager
def new_figure(path: str | Path, width: float, height: float) -> Iterator[Figure]:
    """A figure to draw on, written to ``path`` at the end of the block.

    With the same matplotlib the same drawing makes the same file, byte for byte.

    Args:
        path: Ends in ``.png`` or ``.svg``.
        width, height: Inches.

    Raises:
        WorkloadError: another ending, a path that cannot be written, or no matplotlib.
    """
    path = check_path(path)
    import matplotlib
    from matplotlib.figure import Figure

    # Ignore the user's own settings, so that a figure looks the same everywhere.
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        # Without pyplot there is no global state, no window and no choice of backend: Figure
        # renders PNG with Agg and SVG with the SVG backend.
        figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained")
        yield figure
        file_format = _FORMATS[path.suffix.lower()]
        metadata = {"Date": None} if file_format == "svg" else {}
        try:
            figure.savefig(path, format=file_format, metadata=metadata)
        except OSError as error:
            raise WorkloadError(
                f"path: got {str(path)!r} ({error.strerror}); must be a file that can be written"
            ) from None


def line_styles(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour and marker of each label's line, the same in all figures of a sweep."""
    return {
        label: {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
        for i, label in enumerate(labels)
    }


def log_latency_axis(axis: Any) -> None:
    """Labels 0.1, 0.2, 0.5, 1 …, because latencies span few powers of ten."""
    from matplotlib.ticker import LogLocator

    axis.set_minor_locator(LogLocator(subs=(2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("{x:g}")


def light_grid(axes: Axes) -> None:
    axes.grid(color=LIGHT_GREY, alpha=0.5, linewidth=0.5)
    axes.set_axisbelow(True)
