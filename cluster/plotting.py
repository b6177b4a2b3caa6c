"""Figures as files: no window, the same bytes for the same data, SVG and PNG."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trnsim.device.errors import BadFile, BadInput

SUFFIXES = (".svg", ".png")
_SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "trnsim",  # ids of the file's elements; without it they are random
    "svg.fonttype": "none",
    "figure.dpi": 100,
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.axisbelow": True,
}


def check_figure(path: Path) -> None:
    """Raises BadInput unless the name ends in .svg or .png, BadFile unless its folder exists."""
    if path.suffix.lower() not in SUFFIXES:
        raise BadInput("figure", path, "a name that ends in .svg or .png", path.with_suffix(".svg"))
    if not path.absolute().parent.is_dir():
        raise BadFile(f"{path}: its folder does not exist")


@contextmanager
def figure(width: float, height: float) -> Iterator[Any]:
    """A matplotlib Figure of so many inches, with this module's settings while the body runs."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        yield Figure(figsize=(width, height), layout="constrained")


def save(drawn: Any, path: Path) -> None:
    """Write a figure in the format of the path's suffix, without dates or versions inside."""
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else {"Software": None}
    drawn.savefig(path, metadata=metadata)
