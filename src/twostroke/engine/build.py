"""From a name and a config to a running engine: the only file that joins concrete parts. Says what it chose and why."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from twostroke import __version__, backends, machine
from twostroke.backends.interface import (
    Backend,
    BackendFactory,
    BackendSettings,
    Companion,
    CompanionFactory,
    CostedFactory,
    Listener,
    MaskingBackend,
)
from twostroke.cache import cache_folder
from twostroke.config import KV_MEMORY_OPTION, EngineConfig, ResolvedConfig, resolve
from twostroke.core.errors import BackendError, BadRequestError
from twostroke.core.formats import Formats
from twostroke.core.units import size
from twostroke.cost.calibration import (
    Calibration,
    CalibrationKey,
    latest_on,
    read_calibration,
    write_calibration,
)
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import ModelShape
from twostroke.cost.step_cost import StepCost
from twostroke.cost.trust import error_of
from twostroke.engine.companions import beside, plan_companion, plan_head, refuse_other_tokens
from twostroke.engine.decode_weights import choose_decode_weights
from twostroke.engine.drafting import speculation
from twostroke.engine.engine import Engine
from twostroke.engine.fleet import FleetSettings, staying_of
from twostroke.engine.formats import Choice, choose_formats, format_wish
from twostroke.engine.ranks import ranks_reasons, refuse_with_ranks, with_ranks
from twostroke.engine.tiers import Computed, ledger_of, make_tiers, prefill_seconds, refuse_tiers
from twostroke.engine.vectors import reads_whole, vectors_note, with_vectors
from twostroke.machine import MemorySpace
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.heads import HEADS, load_head
from twostroke.models.heads.mtp import unused_blocks
from twostroke.models.heads.mtp_names import MTP
from twostroke.models.loading import load_checkpoint
from twostroke.models.resolve import resolve as resolve_model
from twostroke.models.weights.tensor import WeightKind
from twostroke.scheduling.config import SchedulerConfig
from twostroke.scheduling.pace import pace_of
from twostroke.scheduling.scheduler import Scheduler
from twostroke.speculation.methods import computing_methods, methods_of
from twostroke.text.grammar import LazyGrammars
from twostroke.text.loading import load_tokenizer
from twostroke.text.tokenizer import Tokenizer

RANDOM_KIND = WeightKind.Q4_1
"""What random weights are drawn in for a backend that quantises, unless asked otherwise; others get BF16."""
BROUGHT_TO = ("fp8", "int4")
"""Kinds that random weights are brought to as a file's would be, from BF16: their scales are no part of a row."""


NOTHING_MEASURED = Ceilings(20e9, 200e9, "assumed: nothing was measured yet")
"""What the cost of steps is first reckoned from where no calibration is stored: measuring takes longer than a small
model's start, and the first steps teach the rest."""


def _calibrations() -> Path:
    return cache_folder() / "calibrations"


@dataclass(frozen=True, slots=True)
class Preparation:
    """All that is decided about an engine before anything is loaded."""

    checkpoint: Checkpoint
    factory: BackendFactory
    formats: Formats
    resolved: ResolvedConfig
    shape: ModelShape
    device: str
    """What computes, by name."""
    reasons: tuple[str, ...]
    companions: tuple[Companion, ...] = ()

    @property
    def scheduler_config(self) -> SchedulerConfig:
        return SchedulerConfig(
            max_context=self.resolved.max_context,
            max_tokens_per_step=self.resolved.sizes.max_tokens_per_step,
            max_running=self.resolved.sizes.max_running,
            prefix_caching=self.resolved.config.kv.prefix_caching,
            whole_prompts=reads_whole(self.checkpoint),
        )

    @property
    def runs_heads(self) -> bool:
        """Whether a head may draft on this backend, and a listener be told what one would read."""
        return isinstance(self.factory, CompanionFactory)

    @property
    def computed(self) -> Computed:
        """KV of two engines that agree in this, on one backend, is the same."""
        short, formats = self.checkpoint.spec.short_rope_context, self.formats
        rope = "long rope" if short is not None and self.resolved.max_context > short else "rope as stored"
        return Computed(f"weights {formats.weights}, arithmetic {formats.arithmetic}, KV {formats.kv}", rope)

    @property
    def _calibration_key(self) -> CalibrationKey:
        return CalibrationKey(self.factory.name, self.device, self.resolved.threads, self.shape, __version__)

    @property
    def calibration_path(self) -> Path:
        return self._calibration_key.path(_calibrations())

    def calibration(self) -> Calibration | None:
        """What `twostroke calibrate` stored for exactly this; None: it was not run."""
        return read_calibration(self.calibration_path)

    def calibration_of_another(self) -> Calibration | None:
        """The latest that it stored for any model on this backend and machine."""
        return latest_on(self._calibration_key.machine, _calibrations())

    def keep_calibration(self, found: Calibration) -> None:
        """Raises OSError."""
        named = replace(found, machine=self._calibration_key.machine, model=self.checkpoint.name)
        write_calibration(self.calibration_path, named)

    def ceilings(self) -> Ceilings:
        """What this machine allows. The first call on a machine may take a moment: it measures."""
        return self.factory.ceilings(self.checkpoint, self.resolved.threads, self.formats)


@dataclass(frozen=True, slots=True)
class Assembly:
    """An engine with the parts it was built from."""

    engine: Engine
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    """None: a model without text, which takes and gives token ids."""
    resolved: ResolvedConfig
    factory: BackendFactory
    shape: ModelShape
    notes: tuple[str, ...]
    """Each choice that was made, with its reason."""
    preparation: Preparation
    grammars: LazyGrammars | None
    """None: this engine holds no answer to a grammar."""

    @property
    def backend_name(self) -> str:
        return self.factory.name

    @property
    def formats(self) -> Formats:
        return self.preparation.formats

    def ceilings(self) -> Ceilings:
        return self.preparation.ceilings()


def build(model: str, config: EngineConfig, *, text: bool = True, fleet: FleetSettings | None = None) -> Assembly:
    """`text` False: token ids in and out, and no tokenizer is loaded. `fleet`: its KV goes to other engines, and comes
    from them."""
    if config.load == "random":
        return _build_random(model, config)
    checkpoint = _load(model)
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.gguf_metadata) if text else None
    return assemble(checkpoint, tokenizer, config, fleet)


def prepare_model(model: str, config: EngineConfig) -> Preparation:
    """What `build` would decide about a model, without its weights: they stay on disk."""
    return prepare(_load(model), config)


def read_tokenizer(model: str) -> Tokenizer:
    """The tokenizer alone, for whoever turns text into token ids in front of an engine in another process."""
    checkpoint = load_checkpoint(resolve_model(model), name=model)  # weights stay on disk until they are looked at
    return load_tokenizer(checkpoint.path, checkpoint.gguf_metadata)


def _build_random(model: str, config: EngineConfig) -> Assembly:
    """A model's shape with weights drawn at random, in the kind they would be held in; token ids only, no text."""
    from twostroke.models.random_weights import KINDS, random_checkpoint

    kinds = {"none": WeightKind.BF16} | {kind.name.lower(): kind for kind in KINDS}
    kind = kinds.get(config.quantise or "none")
    if kind is None and config.quantise in BROUGHT_TO:
        return _noted(assemble(random_checkpoint(Path(model), WeightKind.BF16, name=model), None, config), "BF16")
    if kind is None:
        drawn = ", ".join([*kinds, *BROUGHT_TO])
        raise BadRequestError(f"random weights are drawn in {drawn}, not in {config.quantise}")
    checkpoint = random_checkpoint(Path(model), kind, name=model)
    wish = format_wish(config, checkpoint)
    if config.quantise is None and backends.choose(config.backend, checkpoint, wish)[0].preferred_weights:
        kind = RANDOM_KIND
        checkpoint = random_checkpoint(Path(model), kind, name=model)
    return _noted(assemble(checkpoint, None, replace(config, quantise=None)), kind.name)


def _noted(assembly: Assembly, drawn_in: str) -> Assembly:
    return replace(assembly, notes=(f"random weights: asked for, {drawn_in}", *assembly.notes))


def _say(message: str) -> None:
    """Fetching a model takes a while: nobody should wait before a silent program."""
    print(message, file=sys.stderr)


def choose(checkpoint: Checkpoint, config: EngineConfig, here: machine.Machine) -> Choice:
    """The backend, and the formats that it holds and computes in."""
    refuse_with_ranks(config)
    wish = format_wish(config, checkpoint)
    factory, reason = backends.choose(config.backend, checkpoint, wish, config.tensor_parallel, config.rank_transport)
    return choose_formats(config, checkpoint, here, factory, reason)


def prepare(checkpoint: Checkpoint, config: EngineConfig) -> Preparation:
    here, config = machine.detect(), with_vectors(checkpoint, config)
    choice = choose(checkpoint, config, here)
    factory = choice.factory
    methods = computing_methods(config.speculate)
    plans = tuple(
        plan_companion(method.name, _load(method.source), number, config, factory, here)
        if method.source is not None and method.name not in HEADS
        else plan_head(load_head(method.name, method.source, checkpoint), number, factory, choice.formats)
        for number, method in enumerate(methods, start=1)
    )
    unused = None if any(method.name == MTP for method in methods) else unused_blocks(checkpoint)
    needs = sum((plan.kv_needs for plan in plans), choice.kv_needs)
    memory = beside(choice.memory, plans)

    def resolve_within(space: MemorySpace) -> ResolvedConfig:
        spec, sizes, whole = checkpoint.spec, choice.sizes, reads_whole(checkpoint)
        return resolve(config, spec.max_context, needs, space, sizes, here.threads, spec.short_rope_context, whole)

    offered = factory.decode_weights(checkpoint, choice.formats)
    holding = choose_decode_weights(config, offered, memory, needs, resolve_within)
    formats = holding.in_formats(choice.formats)
    return Preparation(
        checkpoint,
        factory,
        formats,
        holding.resolved,
        replace(choice.shape, decode_weights=holding.copies),
        device=f"{memory.owner}, {machine.processor_name()}{with_ranks(config)}",
        reasons=(
            f"backend {factory.name}: {choice.backend_reason}",
            *ranks_reasons(config, checkpoint, factory),
            f"formats: {formats.line}",
            *([] if choice.steps_reason is None else [choice.steps_reason]),
            *holding.resolved.reasons,
            *(plan.line(holding.resolved) for plan in plans),
            *([] if unused is None else [unused]),
        ),
        companions=tuple(plan.companion for plan in plans),
    )


def _load(model: str) -> Checkpoint:
    """Its weights stay on disk until they are looked at."""
    return load_checkpoint(resolve_model(model, progress=_say), name=model)


def assemble(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer | None,
    config: EngineConfig,
    fleet: FleetSettings | None = None,
    listener: Listener | None = None,
) -> Assembly:
    """`listener`: whoever trains on what the model makes of prompts; then nobody drafts."""
    refuse_with_ranks(config, in_fleet=fleet is not None)
    config = with_vectors(checkpoint, config, in_fleet=fleet is not None)
    prepared = prepare(checkpoint, config)
    _refuse_other_tokens(prepared, tokenizer)
    checkpoint, resolved = prepared.checkpoint, prepared.resolved
    refuse_tiers(config.kv, resolved.layout, in_fleet=fleet is not None)
    backend, calibration = _create(prepared, config, listener), prepared.calibration()
    step_cost = _step_cost(prepared, calibration)
    pace = pace_of(step_cost.seconds, resolved.sizes.itl_target_ms)
    drafting, drafts_note = speculation(
        config.speculate, backend, step_cost, checkpoint.spec.vocab_size, shares=config.kv.prefix_caching
    )
    reads_s = prefill_seconds(step_cost, resolved.sizes.max_tokens_per_step)
    drafters, computed = prepared.companions, prepared.computed
    tiers, tiers_note = make_tiers(config.kv, resolved.layout, checkpoint, backend, reads_s, computed, fleet, drafters)
    scheduler = Scheduler(
        prepared.scheduler_config,
        resolved.layout,
        ledger=ledger_of(prepared.scheduler_config, resolved.layout, tiers),
        pace=pace,
        drafting=drafting,
        max_drafts=backend.max_drafts,
        policy=config.policy,
        levels=config.promised(),
        step_seconds=step_cost.seconds,
        step_error=lambda: error_of(step_cost),
        staying=staying_of(fleet, resolved, step_cost),
    )
    grammars = None
    if tokenizer is not None and checkpoint.pooling is None and isinstance(backend, MaskingBackend):
        grammars = LazyGrammars(tokenizer)
        backend.use_grammars(grammars)
    vocab_size = checkpoint.spec.vocab_size
    engine = Engine(
        scheduler,
        backend,
        vocab_size,
        tokenizer,
        grammars=grammars,
        run_ahead=config.run_ahead,
        check_steps=config.check_steps,
        step_cost=step_cost,
        draft_methods=() if drafting is None else drafting.methods,
        gives_vectors=checkpoint.pooling is not None,
    )
    if checkpoint.pooling is not None:
        drafts_note = vectors_note(checkpoint, checkpoint.pooling)
    notes = (*prepared.reasons, drafts_note, *([] if tiers_note is None else [tiers_note]))
    notes = (*notes, *getattr(backend, "notes", ()), *_calibration_notes(calibration))
    factory, shape = prepared.factory, prepared.shape
    return Assembly(engine, checkpoint, tokenizer, resolved, factory, shape, notes, prepared, grammars)


def _calibration_notes(calibration: Calibration | None) -> list[str]:
    if calibration is None:
        return []
    return [f"step costs: calibrated {calibration.taken}, off by {calibration.error:.0%} on average"]


def _refuse_other_tokens(prepared: Preparation, tokenizer: Tokenizer | None) -> None:
    for companion in prepared.companions:
        if companion.head is not None:
            continue  # it has the target's tokens, by their ids
        own = companion.checkpoint
        other = None if tokenizer is None else load_tokenizer(own.path, own.gguf_metadata)
        refuse_other_tokens(prepared.checkpoint, own, tokenizer, other)


def _create(prepared: Preparation, config: EngineConfig, listener: Listener | None) -> Backend:
    """The backend, with its weights."""
    factory, resolved = prepared.factory, prepared.resolved
    settings = BackendSettings(
        max_context=resolved.max_context,
        max_tokens_per_step=resolved.sizes.max_tokens_per_step,
        threads=resolved.threads,
        max_running=resolved.sizes.max_running,
        formats=prepared.formats,
        companions=prepared.companions,
        drafts=bool(methods_of(config.speculate)),
        listener=listener,
    )
    try:
        return factory.create(prepared.checkpoint, resolved.layout, settings)
    except (MemoryError, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "not enough memory"
        raise BackendError(
            f"the {factory.name} backend could not be set up with {size(resolved.kv_bytes)} of KV and "
            f"{resolved.threads} threads: {reason}; it may start with less memory for KV ({KV_MEMORY_OPTION})"
        ) from error


def _step_cost(prepared: Preparation, calibration: Calibration | None) -> StepCost:
    """What steps should take: as calibrated, or as the backend's first costs have it."""
    shape, factory = prepared.shape, prepared.factory
    if calibration is not None:
        return calibration.step_cost(shape)
    # A pace needs the cost of steps from the first one on.
    first = factory.first_coefficients(shape) if isinstance(factory, CostedFactory) else None
    has_target = prepared.resolved.sizes.itl_target_ms is not None
    return StepCost(shape, prepared.ceilings() if has_target else NOTHING_MEASURED, first)
