"""cuBLAS products of a whole model at different numbers of rows, under sustained load: which step sizes the card likes.

PYTHONPATH=src python bench/cuda/products.py [--hidden 4096] [--intermediate 14336] [--qkv 6144] [--layers 32]"""

from __future__ import annotations

import argparse
import time

import torch

DEFAULT_ROWS = "64,128,256,384,512,640,768,896,1024,1152,1280,1408,1536,1664,1792,1920,2048,2304,3072,4096,8192"
WARM_S, TIMED_S = 0.25, 0.4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=14336)
    parser.add_argument("--qkv", type=int, default=6144)
    parser.add_argument("--attention", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rows", default=DEFAULT_ROWS)
    options = parser.parse_args()

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda") * 0.02

    hidden, intermediate = options.hidden, options.intermediate
    layers = [
        (matrix(options.qkv, hidden), matrix(hidden, options.attention), matrix(2 * intermediate, hidden),
         matrix(hidden, intermediate))
        for _ in range(options.layers)
    ]  # fmt: skip
    parameters = sum(weight.numel() for layer in layers for weight in layer)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {parameters / 1e9:.2f} G parameters")
    print("  rows       ms   us/row  TFLOP/s   TB/s")
    for rows in map(int, options.rows.split(",")):
        x, mixed, activated = matrix(rows, hidden), matrix(rows, options.attention), matrix(rows, intermediate)
        qkv, wide, residual = matrix(rows, options.qkv), matrix(rows, 2 * intermediate), matrix(rows, hidden)

        def run() -> None:
            for into_qkv, out_of, gate_up, down in layers:
                torch.mm(x, into_qkv.t(), out=qkv)  # noqa: B023
                residual.addmm_(mixed, out_of.t())  # noqa: B023
                torch.mm(x, gate_up.t(), out=wide)  # noqa: B023
                residual.addmm_(activated, down.t())  # noqa: B023

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        for limit_s in (WARM_S, TIMED_S):
            residual.zero_()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            started_s, count = time.perf_counter(), 0
            begin.record()
            while time.perf_counter() - started_s < limit_s:
                graph.replay()
                count += 1
                if count % 4 == 0:
                    torch.cuda.synchronize()
            end.record()
            torch.cuda.synchronize()
        each_s = begin.elapsed_time(end) / 1e3 / count
        print(
            f"{rows:6d} {each_s * 1e3:8.2f} {each_s / rows * 1e6:8.2f} {2 * parameters * rows / each_s / 1e12:8.0f}"
            f" {2 * parameters / each_s / 1e12:6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
