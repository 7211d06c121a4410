"""Says which card there is, and fails where kernels would not run on one."""

from __future__ import annotations

import os
import sys

import torch


def main() -> None:
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        sys.exit("TRITON_INTERPRET is set: kernels would run in Triton's interpreter")
    if not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device on this machine")
    from triton import __version__ as triton_version  # where there is no card, there may be no Triton

    properties = torch.cuda.get_device_properties(0)
    free_bytes, _ = torch.cuda.mem_get_info()
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, Triton {triton_version}"
    print(f"{properties.name}, {free_bytes / 2**30:.0f} of {properties.total_memory / 2**30:.0f} GiB free, {versions}")


if __name__ == "__main__":
    main()
