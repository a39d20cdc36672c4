"""A plan as a picture: one row per device, one bar per job."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from saturn_airflow.model.cluster import Node
from saturn_airflow.model.plan import Assignment, Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart by the colour-blind too: https://jfly.uni-koeln.de/color/
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
_INK = "#222222"
_DARK = ("#0072B2", "#D55E00", "#009E73")  # white text reads better on these

_WIDTH = 12.0  # inches
_SIDES = 1.7  # inches left of and right of the bars
_ENDS = 1.3  # inches above and below them
_LABELLED_ROWS = 64  # with more rows only nodes are named


def draw(plan: Plan, format: str = "png", nodes: Iterable[Node] | None = None) -> bytes:
    """Draw a plan.

    :param format: ``"png"`` or ``"svg"``.
    :param nodes: the cluster's nodes, to show devices the plan leaves idle; without them only the devices
        the plan uses are shown.
    :returns: the file's content.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = _rows(plan, nodes)
    # Points per row: bars of a small cluster are comfortable, a large one still fits a screen.
    row_height = min(0.5, max(0.08, 14 / max(len(rows), 1)))
    height = row_height * max(len(rows), 3) + _ENDS
    with matplotlib.rc_context(
        {"font.family": "DejaVu Sans", "svg.hashsalt": "saturn", "svg.fonttype": "none"}
    ):
        figure = Figure(figsize=(_WIDTH, height), dpi=120, facecolor="white")
        FigureCanvasAgg(figure)
        axes = figure.add_axes(
            (1.2 / _WIDTH, 0.62 / height, 1 - _SIDES / _WIDTH, row_height * max(len(rows), 3) / height)
        )
        _draw_frame(axes, plan, rows)
        _draw_jobs(axes, plan, rows, row_height)
        _draw_ends(axes, plan)
        _draw_legend(figure, axes, plan, height)
        file = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing")  # a job may be named in any script
            figure.savefig(file, format=format, metadata={"Date": None} if format == "svg" else None)
    return file.getvalue()


def colours(plan: Plan) -> dict[str, str]:
    """The colour of each technique in the plan."""
    techniques = sorted({a.technique for a in plan.assignments})
    return {technique: PALETTE[n % len(PALETTE)] for n, technique in enumerate(techniques)}


def _rows(plan: Plan, nodes: Iterable[Node] | None) -> list[tuple[str, int]]:
    """(node, device) of each row, the first on top."""
    used = {(a.node, device) for a in plan.assignments for device in a.device_ids}
    if nodes is None:
        return sorted(used)
    known = [(node.name, device) for node in nodes for device in range(node.devices)]
    return known + sorted(used - set(known))


def _draw_frame(axes: Axes, plan: Plan, rows: Sequence[tuple[str, int]]) -> None:
    from matplotlib.ticker import MultipleLocator

    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    axes.set_xlim(0, max(plan.makespan, 1e-9) * 1.01)
    axes.tick_params(length=0, labelsize=8, colors=_INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#BBBBBB")
    axes.xaxis.grid(True, color="#E5E5E5", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MultipleLocator(_tick(plan.makespan)))
    axes.xaxis.set_major_formatter(lambda seconds, _: _duration(seconds))
    axes.set_xlabel("time from the plan's start", fontsize=8, color=_INK)
    first = 0
    ticks: list[int] = []
    labels: list[str] = []
    for band, (node, members) in enumerate(groupby(rows, key=lambda row: row[0])):
        devices = [device for _, device in members]
        if band % 2:
            axes.axhspan(first - 0.5, first + len(devices) - 0.5, color="#F6F6F6", zorder=0)
        if first:
            axes.axhline(first - 0.5, color="#BBBBBB", linewidth=0.6)
        if len(rows) <= _LABELLED_ROWS:
            ticks += range(first, first + len(devices))
            labels += [f"{_short(node, 16)}:{device}" for device in devices]
        else:
            ticks.append(first + len(devices) // 2)
            labels.append(f"{_short(node, 12)} ({len(devices)})")
        first += len(devices)
    every = max(1, len(labels) // _LABELLED_ROWS)
    axes.set_yticks(ticks[::every], labels[::every])
    for text in axes.get_yticklabels():
        text.set_parse_math(False)


def _draw_jobs(axes: Axes, plan: Plan, rows: Sequence[tuple[str, int]], row_height: float) -> None:
    from matplotlib.patches import Rectangle

    number = {row: n for n, row in enumerate(rows)}
    colour = colours(plan)
    inches_per_second = (_WIDTH - _SIDES) / (max(plan.makespan, 1e-9) * 1.01)
    gap = min(0.08, 0.02 / row_height * 0.5)
    for a in plan.assignments:
        width = a.seconds * inches_per_second
        for stretch, (first, count) in enumerate(_stretches(sorted(number[a.node, d] for d in a.device_ids))):
            axes.add_patch(
                Rectangle(
                    (a.start, first - 0.5 + gap),
                    a.seconds,
                    count - 2 * gap,
                    facecolor=colour[a.technique],
                    edgecolor="white",
                    linewidth=min(0.8, row_height * 3),
                )
            )
            if stretch == 0:
                _label(axes, a, first + (count - 1) / 2, width, count * row_height, colour[a.technique])


def _label(axes: Axes, a: Assignment, middle: float, width: float, height: float, colour: str) -> None:
    """Write the job's name, and what fits below it, into its bar of ``width`` by ``height`` inches."""
    size = min(8.0, height * 72 * 0.6)
    characters = int((width - 0.06) / (size * 0.6 / 72)) if size >= 4 else 0
    if characters < 3:
        return
    text = _middle_out(a.job, characters)
    details = f"{a.technique} x{a.devices}, {_duration(a.seconds)}"
    if height > 0.55 and len(details) <= characters:
        text += "\n" + details
    axes.text(
        a.start + a.seconds / 2,
        middle,
        text,
        ha="center",
        va="center",
        fontsize=size,
        color="white" if colour in _DARK else _INK,
        parse_math=False,
        clip_on=True,
    )


def _draw_ends(axes: Axes, plan: Plan) -> None:
    axes.axvline(plan.makespan, color=_INK, linewidth=1.2, label="makespan")
    if 0 < plan.lower_bound < plan.makespan:
        axes.axvline(plan.lower_bound, color=_INK, linewidth=1.0, linestyle=(0, (4, 3)), label="bound")


def _draw_legend(figure: Figure, axes: Axes, plan: Plan, height: float) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Patch | Line2D] = [
        Patch(color=c, label=technique) for technique, c in colours(plan).items()
    ]
    handles.append(Line2D([], [], color=_INK, linewidth=1.2, label=f"makespan {_duration(plan.makespan)}"))
    if 0 < plan.lower_bound < plan.makespan:
        line = Line2D([], [], color=_INK, linestyle=(0, (4, 3)), linewidth=1.0)
        line.set_label(f"no plan can end before {_duration(plan.lower_bound)}")
        handles.append(line)
    legend = figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(1.2 / _WIDTH, 1 - 0.32 / height),
        ncols=8,
        fontsize=8,
        frameon=False,
        borderpad=0,
        handlelength=1.4,
        borderaxespad=0,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    gap = f", gap {100 * plan.gap:.1f}%" if plan.lower_bound > 0 else ""
    title = f"{len(plan.assignments)} jobs in {_duration(plan.makespan)}{gap}"
    figure.text(
        1.2 / _WIDTH,
        1 - 0.22 / height,
        _short(f"{title}: {plan.name}", 110),
        fontsize=10,
        color=_INK,
        parse_math=False,
    )


def _stretches(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of neighbouring rows: (first, how many)."""
    stretches: list[tuple[int, int]] = []
    for number in numbers:
        if stretches and sum(stretches[-1]) == number:
            stretches[-1] = (stretches[-1][0], stretches[-1][1] + 1)
        else:
            stretches.append((number, 1))
    return stretches


def _tick(seconds: float) -> float:
    """Seconds between two marks on the time axis: a round number of them, of minutes or of hours."""
    steps = [10.0**n * m for n in range(-9, 1) for m in (1, 2, 5)]
    steps += [10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200]
    return next((step for step in steps if seconds / step <= 10), 86400.0 * (1 + seconds // 864000))


def _middle_out(text: str, length: int) -> str:
    """Shorten a name in its middle: in a grid its end tells jobs apart."""
    if len(text) <= length:
        return text
    head = (length - 1) // 3
    return text[:head] + "…" + text[len(text) - (length - 1 - head) :]


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: max(1, length - 1)] + "…"


def _duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.3g} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h"
