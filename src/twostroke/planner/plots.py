"""The least time a token can take against the memory's bandwidth, device by device: a plot and its points. matplotlib
(the extra [lab]) is imported when a plot is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from twostroke.core.errors import BadRequestError
from twostroke.cost.devices import Device
from twostroke.planner.deployment import Deployment

FORMATS = (".png", ".svg", ".pdf")
VENDOR_COLOURS = {"NVIDIA": "#4a7c0f", "AMD": "#c0392b", "Apple": "#555555"}
NEAR = 1.12
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
        raise BadRequestError("plots need matplotlib: install twostroke[lab]") from error


def plot_decode(points: Sequence[DecodePoint], title: str, path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    fitting = [point for point in points if point.count]
    lowest, highest = fitting[0].read_bytes_per_s, fitting[-1].read_bytes_per_s
    weights = fitting[0].minimum_s * lowest
    rates = [lowest / 1.3, highest * 1.3]
    axes.plot([rate / 1e12 for rate in rates], [1e3 * weights / rate for rate in rates], color="0.7", zorder=1)
    for index, group in enumerate(_neighbours(fitting)):
        for point in group:
            colour = VENDOR_COLOURS.get(point.device.vendor, "#1f4e79")
            axes.scatter([point.read_bytes_per_s / 1e12], [1e3 * point.minimum_s], s=28, color=colour, zorder=3)
        # Names of one group in one block; blocks to the right above the line and to the left below it, in turn.
        names = "\n".join(point.label for point in group)
        middle = group[len(group) // 2]
        spot = (middle.read_bytes_per_s / 1e12, 1e3 * middle.minimum_s)
        offset, across, upright = ((7, 4), "left", "bottom") if index % 2 else ((-7, -4), "right", "top")
        axes.annotate(
            names,
            spot,
            xytext=offset,
            textcoords="offset points",
            fontsize=7.5,
            ha=across,
            va=upright,
            linespacing=1.15,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlim(rates[0] / 1e12 / 1.8, rates[1] / 1e12 * 1.8)
    axes.set_ylim(1e3 * weights / rates[1] / 1.6, 1e3 * weights / rates[0] * 1.6)
    axes.set_xlabel("memory bandwidth of the devices that hold it (TB/s)")
    axes.set_ylabel("least time per output token, one stream (ms)")
    axes.set_title(title, fontsize=11)
    axes.grid(True, color="0.92", zorder=0)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise BadRequestError(f"cannot write {path}: {error.strerror}") from error


def _neighbours(points: Sequence[DecodePoint]) -> list[list[DecodePoint]]:
    """Those too close to each other for names of their own, together."""
    groups: list[list[DecodePoint]] = []
    for point in points:
        if groups and point.read_bytes_per_s < NEAR * groups[-1][0].read_bytes_per_s:
            groups[-1].append(point)
        else:
            groups.append([point])
    return groups
