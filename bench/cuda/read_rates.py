"""How fast the card's memory is copied and read, by every way of reading that measuring tries and by some that it does
not: whether the ceilings' few are the best there are. `*` marks those that `twostroke bench limits` measures.

    PYTHONPATH=src python -m bench.cuda.read_rates [--rounds 3]"""

from __future__ import annotations

import argparse
import itertools
import time

import torch

from twostroke.backends.cuda import ceilings
from twostroke.backends.cuda.kernels.read_memory import ReadConfig, read_configs
from twostroke.backends.cuda.kernels.target import target_of


def more_configs(has_bulk_copies: bool) -> list[ReadConfig]:
    """Blocks of 8 to 32 KiB, 96 and 192 KiB of them under way in all programs of an SM, or what registers hold."""
    found = []
    if has_bulk_copies:
        for rows, (resident, share) in itertools.product((64, 128, 256), ((1, 192), (2, 96), (4, 48), (2, 48))):
            stages = (share << 10) // (rows * 128) + 1
            found += [ReadConfig(rows, programs, stages, bulk=True) for programs in (resident, 16) if stages > 2]
    found += [ReadConfig(rows, 16, stages, bulk=False) for rows in (64, 128) for stages in (3, 4, 6)]
    found += [ReadConfig(rows, programs, 1, bulk=False) for rows in (64, 128, 256) for programs in (8, 32, 128)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="measure each so often, in turns")
    options = parser.parse_args()
    own = read_configs("cuda")
    configs = list(dict.fromkeys([*own, *more_configs(target_of("cuda").has_bulk_copies)]))
    started_s = time.perf_counter()
    rates = ceilings.machine_rates()
    print(
        f"{rates.device}: all of the ceilings took {time.perf_counter() - started_s:.2f} s, kernels compiled or found"
    )
    for name, value in rates.as_figures().items():
        print(f"  {name}: {value if isinstance(value, str) else f'{value:.4g}'}")

    memory = ceilings.random_memory(ceilings.MEMORY_BYTES)
    copies: list[float] = []
    reads: dict[ReadConfig, list[float]] = {config: [] for config in configs}
    for _ in range(options.rounds):
        copies.append(ceilings.copy_rate(memory))
        for config in configs:
            try:
                reads[config].append(ceilings.read_rates(memory, [config])[config])
            except Exception as error:  # the others are still worth measuring
                print(f"{config}: {type(error).__name__}: {str(error).splitlines()[0]:.100}")
    del memory
    print(f"\nTB/s, the best and the least of {options.rounds} medians, the fastest first")
    print(f"{max(copies) / 1e12:6.3f} {min(copies) / 1e12:6.3f}   copy")
    measured = [config for config in configs if reads[config]]
    for config in sorted(measured, key=lambda config: -max(reads[config])):
        mark = "*" if config in own else " "
        print(f"{max(reads[config]) / 1e12:6.3f} {min(reads[config]) / 1e12:6.3f} {mark} {config}")
    torch.cuda.empty_cache()
    best_own = max(max(reads[config]) for config in own if reads[config])
    best = max(max(found) for found in reads.values() if found)
    print(f"the ceilings' ways reach {best_own / best:.1%} of the best")


if __name__ == "__main__":
    main()
