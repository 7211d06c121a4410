"""The least time a token can take, device by device: a plot and its points. matplotlib
(the extra [lab]) is imported when a plot is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from twostroke.core.errors import BadRequestError, install_hint
from twostroke.cost.devices import Device
from twostroke.planner.deployment import Deployment

FORMATS = (".png", ".svg", ".pdf")
VENDOR_COLOURS = {"NVIDIA": "#4a7c0f", "AMD": "#c0392b", "Apple": "#555555"}
MOST_DEVICES = 8
"""In one machine."""


@dataclass(frozen=True, slots=True)
class DecodePoint:
    device: Device
    read_bytes_per_s: float
    minimum_s: float
    """Of one device, or of as many as hold the model."""
    count: int
    """0: no machine with these devices holds it; the time is one device's."""

    @property
    def label(self) -> str:
        return self.device.name if self.count == 1 else f"{self.count} x {self.device.name}"


def decode_points(deployments: Sequence[Deployment]) -> list[DecodePoint]:
    """Weights read once, no context: of as many devices of one machine as it takes to hold the model and one user."""
    points = []
    for deployment in deployments:
        count = deployment.devices_needed(1) or 0
        if count > (MOST_DEVICES if deployment.device.link_bytes_per_s is not None else 1):
            count = 0
        rate = deployment.device.read_bytes_per_s * (count or 1)
        points.append(DecodePoint(deployment.device, rate, deployment.shape.weight_bytes_read(1) / rate, count))
    return sorted(points, key=lambda point: point.read_bytes_per_s)


def check_plot_file(path: Path) -> None:
    """Before anything is worked out."""
    if path.suffix.lower() not in FORMATS:
        raise BadRequestError(f"a plot's file ends in {', '.join(FORMATS)}, not {path.suffix or 'nothing'!r}")
    if not path.resolve().parent.is_dir():
        raise BadRequestError(f"there is no folder {path.resolve().parent} to write the plot into")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise BadRequestError(f"plots need matplotlib; {install_hint('lab')}") from error


def plot_decode(points: Sequence[DecodePoint], title: str, path: Path, chosen: Device | None = None) -> None:
    """A row a device, the fastest at the top: rows have room for their names, whatever they hold. The chosen one is
    marked."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    fitting = [point for point in points if point.count]
    figure = Figure(figsize=(9, 1.6 + 0.26 * len(fitting)), layout="constrained")
    axes = figure.subplots()
    times_ms = [1e3 * point.minimum_s for point in fitting]
    for row, (point, time_ms) in enumerate(zip(fitting, times_ms, strict=True)):
        colour, is_chosen = colour_of(point.device.vendor), point.device == chosen
        axes.plot([min(times_ms) / 2, time_ms], [row, row], color=colour, alpha=0.35, linewidth=1.2, zorder=2)
        axes.scatter(
            [time_ms], [row], s=110 if is_chosen else 30, marker="*" if is_chosen else "o", color=colour, zorder=3
        )
        note = f"{time_ms:.3g} ms, {point.read_bytes_per_s / 1e12:.2g} TB/s" + (
            ", the one asked about" if is_chosen else ""
        )
        axes.annotate(note, (time_ms, row), xytext=(8, 0), textcoords="offset points", fontsize=7.5, va="center")
    axes.set_yticks(range(len(fitting)), [point.label for point in fitting], fontsize=8)
    for label, point in zip(axes.get_yticklabels(), fitting, strict=True):
        label.set_fontweight("bold" if point.device == chosen else "normal")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(min(times_ms) / 1.5, max(times_ms) * 4)
    axes.set_ylim(-0.8, len(fitting) - 0.2)
    axes.set_xlabel("least time per output token, one stream (ms): the weights over the memory's bandwidth")
    axes.set_title(title, fontsize=11)
    axes.grid(True, axis="x", color="0.92", zorder=0)
    vendors = list(dict.fromkeys(point.device.vendor for point in fitting))
    handles = [Line2D([], [], marker="o", linestyle="", color=colour_of(vendor), label=vendor) for vendor in vendors]
    axes.legend(handles=handles, loc="upper right", fontsize=8)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise BadRequestError(f"cannot write {path}: {error.strerror}") from error


def colour_of(vendor: str) -> str:
    return VENDOR_COLOURS.get(vendor, "#1f4e79")
