"""Workloads of `bench/peers/gpu` on this engine, in turns with steps that end with a prompt where that costs next to
nothing and with steps that are filled: what the first changes for TTFT, ITL and tokens a second.

    PYTHONPATH=src:. python -m bench.cuda.prompts_at_once bench/shapes/qwen2.5-7b --workloads few,bursts --turns 2"""

from __future__ import annotations

import argparse

from bench.peers.gpu.workloads import TEMPERATURE, run
from twostroke.config import EngineConfig
from twostroke.engine.build import build
from twostroke.lab.adapter import EngineAdapter
from twostroke.scheduling import pace

MODES = {"filled": -1.0, "ending": pace.LOST_SHARE}
"""Of a step what another may cost more: none ever costs less than nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--workloads", default="few,bursts,documents,batch")
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    assembly = build(options.folder, EngineConfig(backend="cuda", load="random", max_context=16384), text=False)
    engine, cost = EngineAdapter(assembly.engine, temperature=TEMPERATURE), assembly.engine.step_cost
    assert cost is not None
    for turn in range(options.turns):
        for name in options.workloads.split(","):
            for mode, share in MODES.items():
                pace.LOST_SHARE = share
                figures = run(name, engine, assembly.checkpoint.spec.vocab_size)
                shown = "  ".join(f"{figure} {value:>9}" for figure, value in figures.items())
                print(f"{turn} {name:<10} {mode:<7} {shown}  cost off by {cost.error or 0.0:.1%}", flush=True)
    print(cost.ceilings, cost.coefficients)
    assembly.engine.close()


if __name__ == "__main__":
    main()
