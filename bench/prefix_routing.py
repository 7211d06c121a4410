"""How much of 50 conversations two workers behind smg find cached, beside one server that has them all: they are those
of `tests/cluster/test_prefix_routing.py`. `python -m bench.prefix_routing` takes some minutes on two cores; what it
prints are counts, which a busy machine changes little."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.cluster.test_prefix_routing import NUM_CONVERSATIONS, found_cached

from twostroke.models.resolve import resolve


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = found_cached(Path(folder), resolve("smollm2"))
    print(f"{'conversations':28} {NUM_CONVERSATIONS}")
    print(f"{'tokens of prompts':28} {found.asked:,}")
    print(f"{'cached, one server':28} {found.of_one / found.asked:.1%}")
    print(f"{'cached, two behind smg':28} {found.of_two / found.asked:.1%}")
    print(f"{'of what one server finds':28} {found.of_two / found.of_one:.1%}")
    print(f"{'prompts, by worker':28} {', '.join(f'{share:.0%}' for share in found.by_worker)}")


if __name__ == "__main__":
    main()
