"""The plot's points by hand; the plot itself is drawn and read back."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from twostroke.core.errors import BadRequestError
from twostroke.cost.config_shape import dimensions_from_config
from twostroke.cost.devices import DEVICES, find_device
from twostroke.cost.known_shapes import KNOWN_SHAPES
from twostroke.planner.deployment import Deployment
from twostroke.planner.plots import check_plot_file, decode_points, plot_decode

DIMENSIONS = dimensions_from_config(KNOWN_SHAPES["Llama-3.1-70B"].config)


def test_points_are_of_as_many_devices_as_hold_the_model() -> None:
    deployments = [Deployment("70B", DIMENSIONS, find_device(name)) for name in ("h200", "h100", "b200")]
    points = {point.device.name: point for point in decode_points(deployments)}
    assert (points["H200"].count, points["H100 SXM"].count, points["B200"].count) == (1, 2, 1)
    # 139.0 GB over 4.8, 2 x 3.35 and 8 TB/s.
    assert points["H200"].minimum_s == pytest.approx(28.96e-3, abs=1e-5)
    assert points["H100 SXM"].minimum_s == pytest.approx(20.75e-3, abs=1e-5)
    assert points["B200"].minimum_s == pytest.approx(17.38e-3, abs=1e-5)
    assert [point.read_bytes_per_s for point in decode_points(deployments)] == [4.8e12, 6.7e12, 8e12]


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    path = tmp_path / "decode.png"
    check_plot_file(path)
    plot_decode(decode_points([Deployment("70B", DIMENSIONS, device) for device in DEVICES]), "a title", path)
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:24])
    assert width == 1350 and height > 900  # a row a device
    svg = tmp_path / "decode.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # texts as texts
        devices = [find_device(name) for name in ("h200", "mi300x", "h100")]
        points = decode_points([Deployment("70B", DIMENSIONS, device) for device in devices])
        plot_decode(points, "a title", svg, find_device("h200"))
    text = svg.read_text()
    assert all(name in text for name in ("NVIDIA", "AMD", ">H200<", ">2 x H100 SXM<"))  # a legend, and every name once
    assert text.count("the one asked about") == 1 and "29 ms, 4.8 TB/s, the one asked about" in text


@pytest.mark.parametrize(("name", "message"), [("plot.exe", "ends in .png"), ("missing/plot.png", "no folder")])
def test_bad_files(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match=message):
        check_plot_file(tmp_path / name)


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from pathlib import Path\n"
        "from twostroke.planner.plots import check_plot_file\n"
        f"check_plot_file(Path({str(tmp_path / 'x.png')!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert "plots need matplotlib; pip install '.[lab]'" in done.stderr
