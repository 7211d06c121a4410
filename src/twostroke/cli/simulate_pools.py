"""Two pools in place of one, as `twostroke simulate` was asked for them, and in words what they handed over."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from twostroke.cli import units
from twostroke.core.errors import BadRequestError
from twostroke.core.handoff import SENT_EARLY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.cli.simulate_wish import ReplicasWish
    from twostroke.planner.fleet.link import Link
    from twostroke.planner.fleet.report import FleetReport
    from twostroke.planner.fleet.spec import FleetSpec
    from twostroke.planner.simulate import ReplicaSpec
    from twostroke.planner.trace import TraceRequest


def pools_of(
    wish: ReplicasWish, spec: ReplicaSpec, trace: Sequence[TraceRequest], tensor_parallel: int
) -> FleetSpec | None:
    """None: one pool is asked for."""
    from twostroke.planner.fleet.spec import FleetSpec

    if not wish.has_pools:
        if wish.link is not None:
            raise BadRequestError("--link goes with --prefill and --decode: one pool hands nothing over")
        if wish.early_kv != SENT_EARLY:
            raise BadRequestError("--early-kv goes with --prefill and --decode: one pool hands nothing over")
        return None
    if wish.prefill is None or wish.decode is None:
        raise BadRequestError("two pools need both: --prefill N replicas that read and --decode M that write")
    if wish.count != 1:
        raise BadRequestError("--replicas is one pool's: two pools have --prefill and --decode")
    router = wish.router
    if router == "auto":
        router = "prefix" if any(one.prefix is not None for one in trace) else "least-backlog"
    link = link_asked(wish.link, wish.on, tensor_parallel * (wish.prefill + wish.decode))
    link = replace(link.times(tensor_parallel), is_early=wish.early_kv)
    return FleetSpec(spec, wish.decode, wish.prefill, link, router)


def link_asked(name: str | None, device: str, num_devices: int) -> Link:
    """As it was given; else what joins such devices in one machine, or machines, if there are more of them."""
    from twostroke.cost.devices import find_device
    from twostroke.planner.deployment import DEVICES_A_MACHINE
    from twostroke.planner.fleet.link import BETWEEN_MACHINES, find_link, link_of

    if name is not None:
        return find_link(name)
    if device == "this":
        raise BadRequestError("this machine's link is not known: give its GB a second with --link (10gbe, 1.25, ...)")
    found = find_device(device)
    if num_devices <= DEVICES_A_MACHINE and found.link_bytes_per_s is not None:
        return link_of(found)
    return find_link(BETWEEN_MACHINES)


def pools_record(pools: FleetSpec, fleet: FleetReport) -> dict[str, Any]:
    assert pools.link is not None
    return {
        "prefill": pools.prefill,
        "decode": pools.decode,
        "router": pools.router,
        "link": pools.link.name,
        "link_bytes_per_s": pools.link.bytes_per_s,
        "early_kv": pools.link.is_early,
        "handoffs": asdict(fleet.handoffs),
        "measured": False,
    }


def pools_lines(pools: FleetSpec, fleet: FleetReport) -> list[str]:
    assert pools.link is not None
    return [
        f"{pools.prefill} replicas read and {pools.decode} write.",
        *handoff_lines(pools.link, fleet),
        _note(pools.link),
    ]


def moves(link: Link) -> str:
    """When KV goes, to follow `and`."""
    return "all but a prompt's last chunk hides behind reading" if link.is_early else "all of it goes after reading"


def _note(link: Link) -> str:
    return (
        "Note: the handoff is a model and was not measured: the link moves its line rate, transfers of a replica "
        f"follow each other, and {moves(link)}."
    )


def handoff_lines(link: Link, fleet: FleetReport) -> list[str]:
    """What was handed over, and what was not."""
    handoffs, lines = fleet.handoffs, []
    if handoffs.number:
        exposed = handoffs.exposed_s
        lines.append(
            f"Handoff: {units.size(round(handoffs.mean_bytes))} a prompt on average, {handoffs.number:,} times, over a "
            f"link of {link.name}: {units.seconds(handoffs.link_s['p50'])} on the link at the median, "
            f"{handoffs.hidden_share:.0%} of it behind reading; a first token waits {units.seconds(exposed['p50'])} "
            f"for it (p99 {units.seconds(exposed['p99'])})."
        )
    if handoffs.num_kept:
        lines.append(
            f"{handoffs.num_kept:,} requests were read where they were written: short prompts and prefix hits, for "
            "which queue and handoff would have taken longer."
        )
    if handoffs.num_lost:
        lines.append(f"{handoffs.num_lost:,} times KV came to a full replica, and the prompt was read again there.")
    return lines
