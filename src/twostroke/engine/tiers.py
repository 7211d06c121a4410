"""From what a user asked for to the tiers of an engine: how many blocks host memory holds, whose KV a folder may give
back, and what reading a prompt is predicted to take."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from twostroke import __version__, machine
from twostroke.backends.interface import Backend, BlockBackend, Companion
from twostroke.config import KVConfig
from twostroke.core.errors import BadRequestError
from twostroke.core.kv_blocks import KVFormat
from twostroke.core.kv_layout import KVLayout
from twostroke.core.tier_report import TierReport
from twostroke.core.units import size
from twostroke.cost.floor import StepWork
from twostroke.cost.step_cost import StepCost
from twostroke.engine.fleet import HOST_GB, FleetSettings, make_peers
from twostroke.kv.ledger import KVLedger
from twostroke.kv.tiers.disk import DiskTier
from twostroke.kv.tiers.host import HostTier
from twostroke.kv.tiers.tiers import KVTiers
from twostroke.kv.tiers.worth import PrefillSeconds, Worth
from twostroke.models.checkpoint import Checkpoint, FileTensors
from twostroke.scheduling.config import SchedulerConfig
from twostroke.scheduling.counts import SchedulerCounts

BYTES_PER_GB = 10**9
DEFAULT_DISK_GB = 20.0
STAGING_GB = 1.0
"""Of host memory that a disk needs on its way, where none was asked for."""
GLANCE_BYTES = 64
LAST_WRITES_S = 3.0
"""What an end may take to bring to disk what only memory has."""


def refuse_tiers(config: KVConfig, layout: KVLayout, *, in_fleet: bool = False) -> None:
    """Raise for what cannot be had, before anything is loaded."""
    if in_fleet and any(group.model for group in layout.groups):
        raise BadRequestError(
            "an engine of a fleet does not work beside a model or a head that drafts, whose KV no other engine takes; "
            "--speculate auto works"
        )
    wanted = [flag for flag, asked in (("--kv-host-gb", config.host_gb), ("--kv-disk", config.disk)) if asked]
    if config.disk_gb is not None and config.disk is None:
        raise BadRequestError("--kv-disk-gb says how much of a folder may be used: --kv-disk says which folder")
    if not wanted:
        return
    if not config.prefix_caching:
        raise BadRequestError(f"{wanted[0]} keeps prefixes that were read before, and prefix caching is off")
    there = machine.detect().available_memory_bytes
    if (config.host_gb or 0.0) * BYTES_PER_GB > there:
        raise BadRequestError(f"--kv-host-gb {config.host_gb:g} is more than the {size(there)} of memory that is free")


def make_tiers(
    config: KVConfig,
    layout: KVLayout,
    checkpoint: Checkpoint,
    backend: Backend,
    prefill_seconds: PrefillSeconds,
    computed: Computed,
    fleet: FleetSettings | None = None,
    drafters: Sequence[Companion] = (),
) -> tuple[KVTiers | None, str | None]:
    """The tiers that were asked for, or that a fleet needs, and sentences on them; None: none were. `drafters`: whose
    KV lies beside the model's."""
    if fleet is not None:
        config = replace(config, host_gb=config.host_gb or HOST_GB)
        refuse_tiers(config, layout, in_fleet=True)
        tiers, note = make_tiers(config, layout, checkpoint, backend, prefill_seconds, computed)
        assert tiers is not None and isinstance(backend, BlockBackend)
        model = model_digest(checkpoint, computed.rope)
        return tiers, f"{note}; {make_peers(fleet, tiers, backend, model)}"
    if not config.host_gb and config.disk is None:
        return None, None
    if not isinstance(backend, BlockBackend):
        raise BadRequestError(f"the {backend.name} backend does not give its KV out, so it has no tiers")
    block_format = backend.block_format
    disk_bytes = int((config.disk_gb or DEFAULT_DISK_GB) * BYTES_PER_GB)
    host_bytes = int((config.host_gb or min(STAGING_GB, disk_bytes / BYTES_PER_GB)) * BYTES_PER_GB)
    num_slots = slots_of(layout, block_format, host_bytes)
    disk = None
    if config.disk is not None:
        identity = kv_identity(checkpoint, block_format, computed, drafters)
        folder = Path(config.disk).expanduser().absolute()
        disk = DiskTier(folder, disk_bytes, identity, layout.block_size)
    blocks = backend.keep_blocks(num_slots)
    blocks.touch_ahead()  # a first touch takes many times what a copy does, and spills and handoffs wait for it
    tiers = KVTiers(HostTier(num_slots), block_format, blocks, disk=disk, worth=Worth(prefill_seconds))
    kept = f"{' + '.join(map(str, num_slots))} blocks in {size(host_bytes)} of host memory"
    if disk is None:
        return tiers, f"KV tiers: {kept}"
    return tiers, f"KV tiers: {kept}, {size(disk_bytes)} in {config.disk}, where {len(disk):,} blocks were found"


def ledger_of(config: SchedulerConfig, layout: KVLayout, tiers: KVTiers | None) -> KVLedger:
    """Blocks are named with the folder's key where there is one, so that a restart finds them."""
    key = None if tiers is None or tiers.disk is None else tiers.disk.key
    caching, snapshot_tokens = config.prefix_caching, config.snapshot_tokens
    return KVLedger(layout, prefix_caching=caching, key=key, tiers=tiers, snapshot_tokens=snapshot_tokens)


def slots_of(layout: KVLayout, block_format: KVFormat, host_bytes: int) -> list[int]:
    """Blocks of each group that fit, in the proportion that the device has them."""
    groups = list(zip(layout.groups, block_format.groups, strict=True))
    device_bytes = sum(group.num_blocks * form.num_bytes for group, form in groups)
    slots = [int(group.num_blocks * host_bytes / device_bytes) for group, _ in groups]
    if min(slots) < 2:
        need = 2 * max(device_bytes / group.num_blocks for group, _ in groups)
        raise BadRequestError(
            f"{size(host_bytes)} of host memory hold less than two blocks of each KV group: it takes {size(int(need))} "
            "(--kv-host-gb)"
        )
    return slots


class Computed(NamedTuple):
    """What decides the numbers in KV beside the weights' files and the backend."""

    formats: str
    """Of weights as held, arithmetic and KV, in words: numbers of two engines that differ in it are near each other."""
    rope: str
    """Which of a model's rope factors are used: numbers of two engines that differ in it have nothing in common."""

    def __str__(self) -> str:
        return f"{self.formats}, {self.rope}"


def kv_identity(
    checkpoint: Checkpoint, block_format: KVFormat, computed: Computed, drafters: Sequence[Companion] = ()
) -> str:
    """What must be the same for KV to be an engine's own after a restart: its weights, when their files were written,
    the form that they are computed in, how blocks lie, and the same of those who draft."""
    files = checkpoint.tensors.files if isinstance(checkpoint.tensors, FileTensors) else ()
    weights = _weights_seen(checkpoint, str(computed), files)
    named = {"model": checkpoint.name, "computed": str(computed), "weights": weights}
    for one in drafters:
        own, forms = one.checkpoint, one.formats
        parts = own.path.glob("*.safetensors") if own.path.is_dir() else (own.path,)
        held = f"weights {forms.weights}, arithmetic {forms.arithmetic}, KV {forms.kv}"
        named[f"drafter {one.number}"] = f"{one.method} {_weights_seen(own, held, sorted(parts))}"
    return json.dumps({**named, "layout": json.loads(block_format.described())}, sort_keys=True)


def _weights_seen(checkpoint: Checkpoint, computed: str, files: Iterable[Path]) -> str:
    seen = _glanced(checkpoint, computed)
    for file in files:
        if file.exists():  # a glance misses what changed inside a tensor: whoever wrote it left a new time
            status = file.stat()
            seen.update(f"{file.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return seen.hexdigest()


def model_digest(checkpoint: Checkpoint, rope: str) -> str:
    """What must be the same for another engine's KV to be of this model: its weights as stored. In what form they are
    held, and what computes with them, may differ."""
    return _glanced(checkpoint, rope).hexdigest()


def _glanced(checkpoint: Checkpoint, further: str) -> hashlib.blake2b:
    """Of all weights, as far as a glance at each tells."""
    seen = hashlib.blake2b(f"{__version__}\0{checkpoint.spec!r}\0{further}\0".encode(), digest_size=16)
    for name, tensor in checkpoint.tensors.items():
        seen.update(f"{name}\0{tensor.kind.name}\0{tensor.shape}\0".encode() + tensor.glance(GLANCE_BYTES))
    return seen


def prefill_seconds(cost: StepCost, max_tokens_per_step: int) -> PrefillSeconds:
    """By the engine's own cost model, in the chunks that it would take."""

    def seconds(start: int, num_tokens: int) -> float:
        total_s, end = 0.0, start + num_tokens
        while start < end:
            chunk = min(max_tokens_per_step, end - start)
            total_s += cost.seconds(StepWork(chunks=((start, chunk),)))
            start += chunk
        return total_s

    return seconds


def keep_on_disk(ledger: KVLedger, backend: Backend, limit_s: float = LAST_WRITES_S) -> None:
    """An engine ends: write what only the device or host memory has, the latest used first, as far as time allows."""
    tiers = ledger.tiers
    if tiers is None or tiers.disk is None or not isinstance(backend, BlockBackend):
        return
    until_s, disk = time.monotonic() + limit_s, tiers.disk
    buffers = [memoryview(bytearray(num_bytes)) for num_bytes in tiers.block_bytes]
    for turn in zip_longest(*(pool.cached_latest_first() for pool in ledger.pools)):
        for group, block in enumerate(turn):  # one of each group in turn: a prefix is of use in all of them
            entry = None if block is None else ledger.index.entry_of(group, block)
            if time.monotonic() > until_s:
                return
            if entry is None or not tiers.takes(entry.node) or disk.find(entry.node, group) is not None:
                continue
            backend.read_blocks(group, [block], buffers[group])
            if not disk.write(entry.node, group, buffers[group]):
                return
    tiers.write_kept(until_s)


def tier_report(counts: SchedulerCounts) -> TierReport | None:
    """None: there are no tiers."""
    if (tiers := counts.tiers) is None:
        return None
    totals, hits = tiers.totals, counts.tier_hit_tokens
    moves = ("spilled", "loaded", "written", "fetched")
    return TierReport(
        hit_tokens={"device": counts.prefix_hit_tokens - sum(hits), **hits._asdict()},
        bytes={"host": tiers.host_bytes, "disk": tiers.disk_bytes},
        blocks={"host": tiers.host_blocks, "disk": tiers.disk_blocks},
        limit_bytes={"host": tiers.host_limit_bytes}
        | ({"disk": tiers.disk_limit_bytes} if tiers.disk_limit_bytes else {}),
        moved_blocks={move: getattr(totals, f"{move}_blocks") for move in moves},
        moved_bytes={move: getattr(totals, f"{move}_bytes") for move in moves},
        dropped_blocks={
            "busy": totals.dropped_blocks,
            "unwritten": totals.unwritten_blocks,
            "damaged": totals.damaged_blocks,
        },
        recomputed_tokens=totals.recomputed_tokens,
    )
