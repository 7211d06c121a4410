"""smg as a process of a fleet: `python -m twostroke.cluster.smg_child PARENT OPTIONS...`. The key of its worker API
comes from the environment: smg itself takes it as an argument only, which every user of a machine can read. How often
it looks at its workers is set here, unless OPTIONS say it."""

from __future__ import annotations

import os
import sys

from twostroke.cluster.bound_child import end_with
from twostroke.cluster.router_client import ROUTER_KEY_VARIABLE
from twostroke.cluster.routers import HEALTH_OPTIONS


def main(parent: int, options: list[str]) -> None:
    """`parent` 0: it is bound already."""
    if parent:
        end_with(parent)
    from smg.launch_router import launch_router, parse_router_args

    key = os.environ.pop(ROUTER_KEY_VARIABLE, "")
    keys = ["--control-plane-api-keys", f"fleet:fleet:admin:{key}"] if key else []
    launch_router(parse_router_args([*HEALTH_OPTIONS, *options, *keys]))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
