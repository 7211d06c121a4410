"""Accelerators as their makers describe them: dense peaks, bandwidth, memory, links, and a public price where there is
one. Nothing here is measured: what a backend reaches of it is an efficiency, and is said beside every estimate."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from twostroke.core.errors import BadRequestError
from twostroke.cost.hardware import Ceilings

TERA = 1e12
GIGA = 1e9
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    vendor: str
    peak_flops: Mapping[str, float]
    """FLOP a second by what is multiplied ("bf16", "fp8", "int8", "fp4"): dense, accumulated in 32 bits. Sheets that
    print the number with sparsity were halved. A kind that the device has no arithmetic for is not there."""
    read_bytes_per_s: float
    memory_bytes: int
    """Sheets say GB and mean 2^30 bytes. GDDR6 with error correction on gives up a sixteenth (A10, L4, L40S)."""
    sources: tuple[str, ...]
    """The documents that these numbers are from, and the price's, with its date."""
    price_per_hour_usd: float | None = None
    """Of one device, rented on demand, as one public list or index had it on the day that `sources` names."""
    link_bytes_per_s: float | None = None
    """To its neighbours in the same machine, in one direction, over all links."""
    hopper_sms: int | None = None
    """Multiprocessors, by NVIDIA's H100 whitepaper (but for the PCIe card all have the SXM's); None: no Hopper chip."""
    has_run: bool = False
    """Whether this engine has been run on such a device, and its figures measured there."""

    @property
    def not_run(self) -> str | None:
        """Why a plan of it is one by its data sheet alone, in a sentence; None: the engine has run there."""
        if self.has_run:
            return None
        if self.vendor == "NVIDIA":
            return f"this engine has not been run on {self.name} yet"
        return f"this engine does not run on {self.name}: it has backends for CPUs and for CUDA"

    @property
    def multiply_adds_per_s(self) -> dict[str, float]:
        return {kind: flops / 2 for kind, flops in self.peak_flops.items()}

    def ceilings(self, kind: str = "bf16", count: int = 1) -> Ceilings:
        """Of `count` such devices that share every matrix evenly and wait for nothing: a floor's ceilings."""
        if kind not in self.peak_flops:
            raise BadRequestError(
                f"{self.name} has no {kind} arithmetic in the table: it has {', '.join(self.peak_flops)}"
            )
        if not 1 <= count <= 1024:
            raise BadRequestError(f"the number of devices must be from 1 to 1024, not {count}")
        name = self.name if count == 1 else f"{count} x {self.name}"
        return Ceilings(
            read_bytes_per_s=count * self.read_bytes_per_s,
            multiply_adds_per_s=count * self.peak_flops[kind] / 2,
            source=f"{name} by data sheet: {kind}",
        )

    def ridge_flops_per_byte(self, kind: str = "bf16") -> float:
        """The arithmetic intensity below which memory is what limits."""
        ceilings = self.ceilings(kind)
        return 2 * ceilings.multiply_adds_per_s / ceilings.read_bytes_per_s


def find_device(name: str) -> Device:
    """By name, whatever its case, spaces and dashes; "h100" is the H100 SXM."""
    wanted = _key(name)
    found = _BY_KEY.get(wanted)
    if found is not None:
        return found
    near = difflib.get_close_matches(wanted, _BY_KEY, n=4, cutoff=0.5)
    near_names = list(dict.fromkeys(_BY_KEY[key].name for key in near))
    hint = f"did you mean {' or '.join(near_names)}? " if near_names else ""
    shown = name if len(name) <= 60 else f"{name[:57]}..."
    raise BadRequestError(f"there is no device {shown!r}; {hint}known are: {', '.join(d.name for d in DEVICES)}")


def _key(name: str) -> str:
    key = re.sub(r"[\s_-]+", "", name.lower())
    return re.sub(r"^(nvidia|geforce|amd|instinct|apple)+", "", key)


def _tera(**peaks: float) -> dict[str, float]:
    return {kind: peak * TERA for kind, peak in peaks.items()}


_AIMULTIPLE = "price: AIMultiple, Cloud GPU Rental Price Index, median on demand, 2026-05-20"
_TECHBYTES = "price: TechBytes, Serverless GPU Pricing Matrix, 2026-05-07"
_SPHERON = "price: Spheron, H200 vs B200 vs GB200, on demand, 2026-03-17"
_CLIFFCENTER = "price: Cliff Center, AMD inference economics, 2026-05-18"
_DEPLOYBASE = "price: Deploybase, RunPod GPU Pricing, on demand, 2026-03-10"
_LAMBDA, _MODAL = f"{_TECHBYTES} (Lambda)", f"{_TECHBYTES} (Modal)"
_ADA = "NVIDIA Ada GPU Architecture whitepaper, appendix A"
_AMPERE = "NVIDIA Ampere GA102 GPU Architecture whitepaper, appendix A"
_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A"
_A100 = "NVIDIA A100 Tensor Core GPU data sheet (SXM, {} GB)"
_H100_PCIE = "NVIDIA H100 Tensor Core GPU data sheet (PCIe); memory: H100 PCIe product brief"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet (SXM)"
_H200_MEMORY = "memory: as its driver reports it (bench/results/cuda-bench.txt)"
_GH200 = "NVIDIA GH200 Grace Hopper Superchip data sheet ({})"
_B200 = "NVIDIA Blackwell Architecture Technical Brief, HGX B200; bandwidth: DGX B200 data sheet, a GPU"
_B300 = "NVIDIA HGX B300 specifications, a GPU; as compared by Verda (DataCrunch), B300 vs B200"
_APPLE_CORES = "GPU peak: cores x 128 lanes x 2 FLOP x clock, which Apple does not publish (HMC-Tech GPU database)"
_HOPPER = {"hopper_sms": 132}
_ECC = 24 * GIB * 15 // 16


def _device(
    vendor: str,
    name: str,
    peaks: Mapping[str, float],
    read: float,
    memory: int,
    price: float | None,
    link: float | None,
    *sources: str,
    **more: Any,
) -> Device:
    return Device(name, vendor, peaks, read, memory, sources, price, link, **more)


_nvidia, _amd = partial(_device, "NVIDIA"), partial(_device, "AMD")


def _apple(name: str, tflops: float, gb_per_s: float, memory_gb: int, sheet: str, *notes: str) -> Device:
    """Its GPU runs 16-bit floats no faster than 32-bit ones; memory is the largest it is sold with."""
    peaks = _tera(bf16=tflops)
    return _device("Apple", f"Apple {name}", peaks, gb_per_s * GIGA, memory_gb * GIB, None, None, sheet, *notes)


# Name, FLOP a second, bytes a second, memory, dollars an hour, bytes a second to its neighbours, sources.
DEVICES: tuple[Device, ...] = (
    _nvidia("RTX 3090", _tera(bf16=71, int8=284), 936e9, 24 * GIB, 0.39, 56.25e9, _AMPERE, _DEPLOYBASE),
    _nvidia("RTX 4090", _tera(bf16=165.2, fp8=330.3, int8=660.6), 1008e9, 24 * GIB, 0.60, 32e9, _ADA, _DEPLOYBASE),
    _nvidia(
        "RTX 5090",
        _tera(bf16=209.5, fp8=419, int8=838, fp4=1676),
        1792e9,
        32 * GIB,
        1.22,
        64e9,
        _BLACKWELL,
        _DEPLOYBASE,
    ),
    _nvidia(
        "A10", _tera(bf16=125, int8=250), 600e9, _ECC, 0.86, 32e9, "NVIDIA A10 Tensor Core GPU data sheet", _LAMBDA
    ),
    _nvidia(
        "L4",
        _tera(bf16=121, fp8=242.5, int8=242.5),
        300e9,
        _ECC,
        0.80,
        32e9,
        "NVIDIA L4 Tensor Core GPU data sheet",
        _MODAL,
    ),
    _nvidia(
        "L40S", _tera(bf16=362.05, fp8=733, int8=733), 864e9, 2 * _ECC, 1.95, 32e9, "NVIDIA L40S data sheet", _MODAL
    ),
    _nvidia("A100 40GB", _tera(bf16=312, int8=624), 1555e9, 40 * GIB, 1.48, 300e9, _A100.format(40), _LAMBDA),
    _nvidia("A100 80GB", _tera(bf16=312, int8=624), 2039e9, 80 * GIB, 2.50, 300e9, _A100.format(80), _MODAL),
    _nvidia(
        "H100 SXM",
        _tera(bf16=989.5, fp8=1979, int8=1979),
        3.35e12,
        80 * GIB,
        2.95,
        450e9,
        "NVIDIA H100 Tensor Core GPU data sheet (SXM)",
        _AIMULTIPLE,
        **_HOPPER,
    ),
    _nvidia(
        "H100 PCIe",
        _tera(bf16=756.5, fp8=1513, int8=1513),
        2.0e12,
        80 * GIB,
        2.86,
        64e9,
        _H100_PCIE,
        _LAMBDA,
        hopper_sms=114,
    ),
    _nvidia(
        "H200",
        _tera(bf16=989.5, fp8=1979, int8=1979),
        4.8e12,
        143_771 * 2**20,
        4.54,
        450e9,
        _H200,
        _H200_MEMORY,
        _SPHERON,
        **_HOPPER,
        has_run=True,
    ),
    _nvidia(
        "GH200 96GB",
        _tera(bf16=990, fp8=1979, int8=1979),
        4.0e12,
        96 * GIB,
        None,
        450e9,
        _GH200.format("HBM3"),
        **_HOPPER,
    ),
    _nvidia(
        "GH200 144GB",
        _tera(bf16=990, fp8=1979, int8=1979),
        4.9e12,
        144 * GIB,
        None,
        450e9,
        _GH200.format("HBM3e"),
        **_HOPPER,
    ),
    _nvidia("B200", _tera(bf16=2250, fp8=4500, int8=4500, fp4=9000), 8.0e12, 180 * GIB, 6.03, 900e9, _B200, _SPHERON),
    _nvidia("B300", _tera(bf16=2250, fp8=4500, int8=150, fp4=14_000), 8.0e12, 288 * GIB, None, 900e9, _B300),
    _amd(
        "MI300X",
        _tera(bf16=1307.4, fp8=2614.9, int8=2614.9),
        5.3e12,
        192 * GIB,
        1.99,
        448e9,
        "AMD Instinct MI300X data sheet",
        f"{_CLIFFCENTER}, median",
    ),
    _amd(
        "MI325X",
        _tera(bf16=1307.4, fp8=2614.9, int8=2614.9),
        6.0e12,
        256 * GIB,
        1.95,
        448e9,
        "AMD Instinct MI325X data sheet",
        f"{_CLIFFCENTER}, TensorWave",
    ),
    _amd(
        "MI355X",
        _tera(bf16=2516.6, fp8=5033.2, int8=5033.2, fp4=10_066.3),
        8.0e12,
        288 * GIB,
        None,
        537.6e9,
        "AMD Instinct MI355X data sheet",
    ),
    _apple("M1", 2.6, 68.25, 16, "Apple, Apple unleashes M1 (newsroom, 2020-11-10)"),
    _apple("M1 Max", 10.4, 400, 64, "Apple, M1 Pro and M1 Max (newsroom, 2021-10-18)"),
    _apple("M1 Ultra", 21, 800, 128, "Apple, M1 Ultra (newsroom, 2022-03-08)"),
    _apple("M2", 3.6, 100, 24, "Apple, M2 (newsroom, 2022-06-06)"),
    _apple("M2 Ultra", 27.2, 800, 192, "Apple, M2 Ultra (newsroom, 2023-06-05)", _APPLE_CORES),
    _apple("M3 Max", 14.3, 400, 128, "Apple, M3 family (newsroom, 2023-10-30)", _APPLE_CORES),
    _apple("M3 Ultra", 28.6, 819, 512, "Apple, M3 Ultra (newsroom, 2025-03-05)", _APPLE_CORES),
    _apple("M4", 3.8, 120, 32, "Apple, M4 (newsroom, 2024-05-07)", _APPLE_CORES),
    _apple("M4 Pro", 7.5, 273, 64, "Apple, M4 Pro and M4 Max (newsroom, 2024-10-30)", _APPLE_CORES),
    _apple("M4 Max", 17.2, 546, 128, "Apple, M4 Pro and M4 Max (newsroom, 2024-10-30)", _APPLE_CORES),
)

_NICKNAMES = {"h100": "H100 SXM", "a100": "A100 80GB", "gh200": "GH200 96GB", "h200sxm": "H200", "h100sxm5": "H100 SXM"}
_BY_KEY = {_key(device.name): device for device in DEVICES}
_BY_KEY |= {nickname: _BY_KEY[_key(name)] for nickname, name in _NICKNAMES.items()}
