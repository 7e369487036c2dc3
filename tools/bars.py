"""Bar charts that commands write, by matplotlib: horizontal bars on a log axis, with values."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

from torchvm.tools.files import write_file
from torchvm.tools.messages import CommandError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

__all__ = ["Bar", "Panel", "check_plots", "write_chart"]

SUFFIXES = (".svg", ".png")
_COLOURS = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7f7f7f", "#b5a300",
)  # fmt: skip
"""Told apart by people who see colours differently too (after Okabe and Ito)."""
_INCHES_A_BAR = 0.24
_GAP = 0.8
"""Between groups, in bars."""


class Bar(NamedTuple):
    """One bar."""

    series: str
    """Bars of one series have one colour."""
    value: float
    text: str
    """What stands behind the bar."""
    low: float | None = None
    """Where the whisker begins; None draws none."""
    high: float | None = None


class Panel(NamedTuple):
    """Bars on one axis, in groups."""

    title: str
    axis: str
    """What the axis shows, with its unit."""
    ticks: Callable[[float], str]
    """Writes a number of the axis."""
    groups: tuple[tuple[str, tuple[Bar, ...]], ...]
    """A label and its bars, from top to bottom."""
    base: int = 10
    """Ticks stand at its powers."""
    mark: tuple[float, str] | None = None
    """A value to compare with, drawn as a line, and its label."""


def check_plots(option: str, path: Path | None = None) -> None:
    """Find out before any work whether charts can be drawn.

    Raises:
        CommandError: without matplotlib, or for a path that does not say the format.
    """
    if path is not None and path.suffix.lower() not in SUFFIXES:
        raise CommandError(f"{option} must end in .svg or .png, got {str(path)!r}")
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError as error:
        raise CommandError(
            f"{option} needs matplotlib ({error}): pip install 'torchvm[plot]'"
        ) from error


def write_chart(path: Path, panels: Sequence[Panel], *, title: str, footer: str = "") -> None:
    """Draw panels below each other, in the format that the path ends in.

    Raises:
        CommandError: when the file cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [_INCHES_A_BAR * _rows(panel) + 0.3 for panel in panels]
    # The same figures give the same file, byte for byte; SVG keeps text as text.
    style: Any = {"svg.hashsalt": "torchvm", "svg.fonttype": "none", "text.parse_math": False}
    with mpl.rc_context(style):
        figure = Figure(
            figsize=(9, sum(heights) + 0.75 * len(panels) + 0.4), dpi=150, layout="constrained"
        )
        FigureCanvasAgg(figure)
        figure.suptitle(title, fontsize=12, fontweight="bold")
        figure.supxlabel(footer, fontsize=7, x=0.01, ha="left")
        grid = figure.add_gridspec(len(panels), 1, height_ratios=heights)
        for row, panel in enumerate(panels):
            _draw(figure.add_subplot(grid[row, 0]), panel)
        drawn = BytesIO()
        kind = path.suffix.lower().removeprefix(".")
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        figure.savefig(drawn, format=kind, metadata=metadata, facecolor="white")
    write_file(path, drawn.getvalue())


def _rows(panel: Panel) -> float:
    """Bars of a panel, and the space between its groups."""
    return sum(len(bars) + _GAP for _, bars in panel.groups)


def _draw(axes: Axes, panel: Panel) -> None:
    names = list(dict.fromkeys(bar.series for _, bars in panel.groups for bar in bars))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    place = 0.0
    centres = []
    for _, bars in panel.groups:
        centres.append(place + (len(bars) - 1) / 2)
        for bar in bars:
            _draw_bar(axes, place, bar, colours[bar.series])
            place += 1
        place += _GAP
    _scale(axes, panel)
    axes.set_ylim(place - _GAP - 0.4, -0.6)
    axes.set_yticks(centres, [label for label, _ in panel.groups], fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.set_xlabel(f"{panel.axis}, log scale", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    if len(names) > 1:
        handles = [axes.barh(0, 0, color=colours[name], label=name) for name in names]
        axes.legend(
            handles=handles, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False
        )


def _draw_bar(axes: Axes, place: float, bar: Bar, colour: str) -> None:
    axes.barh(place, bar.value, height=0.86, color=colour)
    end = bar.value
    if bar.low is not None and bar.high is not None:
        axes.hlines(place, bar.low, bar.high, color="black", linewidth=1)
        end = max(end, bar.high)
    axes.annotate(
        bar.text, (end, place), (4, 0), textcoords="offset points", va="center", fontsize=8
    )


def _scale(axes: Axes, panel: Panel) -> None:
    """Set a log axis with room for the text behind the longest bar, and draw the mark."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    values = [bar.value for _, bars in panel.groups for bar in bars]
    if panel.mark is not None:
        value, text = panel.mark
        values.append(value)
        axes.axvline(value, color="black", linewidth=1, linestyle="--")
        axes.annotate(
            text, (value, 1.0), (0, 3), xycoords=("data", "axes fraction"),
            textcoords="offset points", ha="center", va="bottom", fontsize=8,
        )  # fmt: skip
    low, high = min(values) / 3, max(values)
    axes.set_xscale("log")
    axes.set_xlim(low, high * (high / low) ** 0.15)
    # Powers alone leave a short axis with one tick or none.
    subs = (1.0, 2.0, 5.0) if panel.base == 10 and high / low < 100 else (1.0,)
    axes.xaxis.set_major_locator(LogLocator(base=panel.base, subs=subs))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: panel.ticks(value)))
    axes.tick_params(axis="x", labelsize=8)
