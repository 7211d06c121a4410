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


@dataclass(frozen=True, slots=True)
class DecodePoint:
    device: Device
    read_bytes_per_s: float
    minimum_s: float
    """Of one device, or of as many as hold the model."""
    count: int
    """0: it does not fit into 64 of them; the time is one device's."""


def decode_points(deployments: Sequence[Deployment]) -> list[DecodePoint]:
    """Weights read once, no context: of as many devices as it takes to hold the model and one user."""
    points = []
    for deployment in deployments:
        count = deployment.devices_needed(1)
        rate = deployment.device.read_bytes_per_s * (count or 1)
        points.append(DecodePoint(deployment.device, rate, deployment.shape.weight_bytes_read(1) / rate, count or 0))
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

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    fitting = [point for point in points if point.count]
    lowest, highest = fitting[0].read_bytes_per_s, fitting[-1].read_bytes_per_s
    weights = fitting[0].minimum_s * lowest
    rates = [lowest / 1.3, highest * 1.3]
    axes.plot([rate / 1e12 for rate in rates], [1e3 * weights / rate for rate in rates], color="0.7", zorder=1)
    vendors = {"NVIDIA": "#4a7c0f", "AMD": "#c0392b", "Apple": "#555555"}
    for index, point in enumerate(fitting):
        colour = vendors.get(point.device.vendor, "#1f4e79")
        x, y = point.read_bytes_per_s / 1e12, 1e3 * point.minimum_s
        axes.scatter([x], [y], s=28, color=colour, zorder=3)
        label = point.device.name if point.count == 1 else f"{point.count} x {point.device.name}"
        # Neighbours on a line lie close: names go above and below it in turn.
        offset, align = ((6, 6), "left") if index % 2 else ((-6, -11), "right")
        axes.annotate(label, (x, y), xytext=offset, textcoords="offset points", fontsize=7.5, ha=align, color=colour)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(rates[0] / 1e12 / 1.4, rates[1] / 1e12 * 1.4)
    axes.set_xlabel("memory bandwidth of the devices that hold it (TB/s)")
    axes.set_ylabel("least time per output token, one stream (ms)")
    axes.set_title(title, fontsize=11)
    axes.grid(True, which="both", color="0.92", zorder=0)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise BadRequestError(f"cannot write {path}: {error.strerror}") from error
