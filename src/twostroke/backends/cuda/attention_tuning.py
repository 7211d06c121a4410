"""Measures, on the card under us, how the kernels of attention are best set for a model's heads: decode by streams,
prompts by the height of tiles. Every setting's result is compared with float32 before it is timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from twostroke.backends.cuda.attention import INTERPRETED_SMS, MOST_TOGETHER, choose_prefill
from twostroke.backends.cuda.attention_cases import Model, Pool, graph_seconds, relative_error
from twostroke.backends.cuda.attention_table import Row, settings_for
from twostroke.backends.cuda.compile_ahead import compiled_ahead
from twostroke.backends.cuda.kernels import flash_prefill, prefill_attention
from twostroke.backends.cuda.kernels.decode_attention import MAX_GROUP, DecodeScratch, attend_decode
from twostroke.backends.cuda.kernels.decode_cuts import CutRule, SplitPlan, cut_contexts, decode_config, split_plan
from twostroke.backends.cuda.kernels.flash_prefill import FlashOptions
from twostroke.backends.cuda.kernels.paged import AttentionShape, PagedKV, Scoring, WalkConfig
from twostroke.backends.cuda.kernels.prefill_tiles import PrefillScratch, PrefillTiles, PrefillWork
from twostroke.backends.cuda.kernels.target import target_of
from twostroke.backends.interface import TunedChange
from twostroke.models.spec import GroupedAttention, ModelSpec

STREAMS = ((1, 2048), (4, 2048), (16, 1024), (64, 1024), (256, 1024))
"""Decodes that are measured, and their contexts; a number between two is treated as the larger."""
CHUNKS = (256, 4096)
"""Tokens of a prompt: as many as have low tiles, and as many as have high ones."""
PAGE = 64
POOL_TOKENS = 1 << 18
WALKS = tuple(
    WalkConfig(block, warps, stages, ahead)
    for block in (16, 32, 64)
    for warps in (2, 4)
    for stages in (3, 5)
    for ahead in (1,)
)
CUTS = tuple(CutRule(items, smallest) for items in (1, 2, 4) for smallest in (32, 64, 128))
PROMPT_WALKS = tuple(
    WalkConfig(block, warps, stages) for block in (16, 32, 64, 128) for warps in (4, 8) for stages in (2, 3)
)
FLASH_KEYS = (64, 128, 192)
TOLERANCE = 2.0e-2
LEAST_GAIN = 0.03

Setting = WalkConfig | CutRule | FlashOptions
Launches = Sequence[Callable[[], None]]


@dataclass
class Found:
    """What was fastest, as rows of the table, and what changed by it."""

    rows: dict[str, list[Row]] = field(default_factory=dict)
    changes: list[TunedChange] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Trial:
    setting: Setting | None
    """None: cuts as the table has them."""
    launches: Launches
    out: torch.Tensor


def tune_attention(
    spec: ModelSpec, dtype: torch.dtype, until_s: float, *, device: str = "cuda", pool_tokens: int = POOL_TOKENS
) -> Found:
    """`until_s`: when to stop, by the clock of `time.perf_counter`; what is not measured by then stays as it is."""
    found = Found()
    for model in models_of(spec, dtype, device):
        pool = Pool(model, pool_tokens)
        measured = _Measuring(model, pool, found, until_s)
        measured.decodes()
        measured.prompts()
    return found


def models_of(spec: ModelSpec, dtype: torch.dtype, device: str) -> list[Model]:
    """The kinds of attention that a model's layers have, each once, as far as keys and values are of heads."""
    target = target_of(device)
    num_sms = target.num_sms if torch.device(device).type == "cuda" else INTERPRETED_SMS
    found = {}
    for layer in spec.layers:
        heads = layer.attention
        if isinstance(heads, GroupedAttention) and spec.is_causal:
            shape = AttentionShape(heads.num_heads, heads.num_kv_heads, heads.head_dim, PAGE, dtype)
            scoring = Scoring(heads.head_dim**-0.5, heads.window)
            found[shape, scoring.window] = Model(shape, scoring, num_sms, device)
    return list(found.values())


class _Measuring:
    """One kind of attention."""

    def __init__(self, model: Model, pool: Pool, found: Found, until_s: float) -> None:
        self._model, self._pool, self._found, self._until_s = model, pool, found, until_s
        self._target = target_of(model.device)
        self._drawn = torch.Generator().manual_seed(1)

    @property
    def _window(self) -> int | None:
        return self._model.scoring.window

    @property
    def _name(self) -> str:
        """Layers that differ in their window alone are measured apart, and told apart."""
        shape = self._model.shape
        return f"{shape.heads} x {shape.head_dim}" + (f", window {self._window}" if self._window else "")

    def _cut_now(self, streams: int) -> SplitPlan:
        return split_plan(
            streams, self._model.shape.kv_heads, self._model.num_sms, self._target.name, window=self._window
        )

    @property
    def _is_over(self) -> bool:
        return time.perf_counter() > self._until_s

    def decodes(self) -> None:
        """How one program walks, and then how keys are cut for programs that walk so."""
        shape = self._model.shape
        if shape.group > MAX_GROUP or shape.head_dim > MOST_TOGETHER:
            return
        last = STREAMS[-1][0]
        for (before, _), (streams, context) in pairwise(((0, 0), *STREAMS)):
            if self._is_over:
                return
            step = _Decodes(self._model, self._pool, streams, context)
            tokens = [before + 1, None if streams == last else streams]
            walk = decode_config(shape.head_dim, streams, step.positions.device, window=self._window)
            cut = self._cut_now(streams)
            of = f"decode attention {self._name}", streams
            trials = (partial(step.trial, setting, setting, cut) for setting in (walk, *_others(walk, WALKS)))
            best = self._best(of, trials, step.error)
            if best is None:
                continue
            assert isinstance(best, WalkConfig)
            if best != walk:
                when = {"head_dim": [shape.head_dim] * 2, "tokens": tokens, "window": [self._window or 0] * 2}
                self._found.rows.setdefault("decode", []).append({"when": when, "use": asdict(best)})
            if streams > 1:
                self._cuts(step, best, of)

    def _cuts(self, step: _Decodes, walk: WalkConfig, of: tuple[str, int]) -> None:
        """Long items, which no context here has, are cut further as they were."""
        kv_heads, num_sms = self._model.shape.kv_heads, self._model.num_sms
        now, window = self._cut_now(step.streams), self._window or 0
        programs = step.streams * kv_heads // num_sms

        def of_long_items(programs_per_sm: int) -> dict[str, int]:
            facts = {"tokens": step.streams, "programs_per_sm": programs_per_sm, "window": window}
            known = settings_for("decode cuts", self._target.name, **facts)
            return {name: value for name, value in known.items() if name.startswith("long_")}

        further = of_long_items(programs)
        plans = {rule: replace(rule, **further).plan(step.streams, kv_heads, num_sms) for rule in CUTS}
        trials = [partial(step.trial, None, walk, now)]
        trials += [partial(step.trial, rule, walk, plan) for rule, plan in plans.items() if plan != now]
        best = self._best((f"cuts of {of[0]}", of[1]), trials, step.error)
        if isinstance(best, CutRule):
            fewest = next(each for each in range(programs // 2, programs + 1) if of_long_items(each) == further)
            when = {
                "tokens": [step.streams // 2 + 1, step.streams],
                "programs_per_sm": [fewest, programs],
                "window": [window] * 2,
            }
            use = asdict(replace(best, **further))
            self._found.rows.setdefault("decode cuts", []).append({"when": when, "use": use})

    def prompts(self) -> None:
        shape, window = self._model.shape, self._window
        kernel, _ = choose_prefill(shape, self._target)
        for tokens in CHUNKS:
            if self._is_over or tokens > self._pool.num_blocks * PAGE:
                return
            step = _Chunk(self._model, self._pool, tokens)
            rows = step.work.tile_rows
            of = f"prompt attention {self._name}", tokens
            when = {"head_dim": [shape.head_dim] * 2, "tile_rows": [rows, rows], "window": [window or 0] * 2}
            if kernel is flash_prefill:
                options = flash_prefill.options_for(shape, rows, window, self._target.name)
                others = _others(options, [FlashOptions(rows, keys) for keys in FLASH_KEYS])
                trials = (partial(step.trial, one, flash_prefill.attend, options=one) for one in (options, *others))
                best = self._best(of, trials, step.error)
                if isinstance(best, FlashOptions) and best != options:
                    self._found.rows.setdefault("flash prefill", []).append({"when": when, "use": {"keys": best.keys}})
                continue
            config = prefill_attention.prefill_config(rows, shape.head_dim, self._target, window=window)
            others = _others(config, PROMPT_WALKS)
            trials = (partial(step.trial, one, prefill_attention.attend, config=one) for one in (config, *others))
            best = self._best(of, trials, step.error)
            if isinstance(best, WalkConfig) and best != config:
                self._found.rows.setdefault("plain prefill", []).append({"when": when, "use": asdict(best)})

    def _best(
        self,
        of: tuple[str, int],
        trials: Iterable[Callable[[], Trial]],
        error_of: Callable[[torch.Tensor], float],
    ) -> Setting | None:
        """The first trial is what the table has; another is chosen where it is clearly faster. None: as it is."""
        makes, times = list(trials), dict[int, tuple[float, Setting | None]]()

        def rehearse() -> None:
            for make in makes:
                with suppress(Exception):  # said below, where it counts
                    make().launches[0]()

        with compiled_ahead(rehearse, wanted=torch.device(self._model.device).type == "cuda"):
            for number, make in enumerate(makes):
                if times and self._is_over:
                    break
                try:
                    times[number] = _timed(make(), error_of)
                except Exception as error:  # a setting that the card has no room for, or that is wrong on it
                    name = str(getattr(make, "args", ("?",))[0])
                    fault = f"{type(error).__name__}: {str(error)[:200]}"
                    self._found.faults.append(f"{of[0]} of {of[1]} by {name}: {fault}")
        if 0 not in times:
            return None
        now, best = times[0], min(times.values(), key=lambda timed: timed[0])
        if best[0] * (1 + LEAST_GAIN) >= now[0]:
            return now[1]
        self._found.changes.append(TunedChange(*of, str(now[1]), now[0] * 1e6, str(best[1]), best[0] * 1e6))
        return best[1]


def _timed(trial: Trial, error_of: Callable[[torch.Tensor], float]) -> tuple[float, Setting | None]:
    trial.out.fill_(float("nan"))
    trial.launches[0]()
    error = error_of(trial.out)
    if not error < TOLERANCE:
        raise ValueError(f"error {error:.4f}")
    return graph_seconds(trial.launches), trial.setting


def _others(now: Any, candidates: Sequence[Any]) -> list[Any]:
    return [one for one in candidates if one != now]


class _Decodes:
    """A step of streams of one context."""

    def __init__(self, model: Model, pool: Pool, streams: int, context: int) -> None:
        self.streams, self._model, self._pool = streams, model, pool
        context = min(context, pool.num_blocks // streams * PAGE)
        self._contexts = [context] * streams
        self._tables = pool.tables(self._contexts)
        self._queries, self._out = model.queries(streams), model.outputs(streams)
        self._rows = torch.arange(streams, dtype=torch.int32, device=model.device)
        self.positions = torch.full((streams,), context - 1, dtype=torch.int32, device=model.device)
        self._scratch = DecodeScratch(streams, model.shape, model.device, model.num_sms)

    def trial(self, setting: Any, walk: WalkConfig, plan: Any) -> Trial:
        items, scoring = None, self._model.scoring
        if self.streams > 1:  # cut once, as a step does for all its layers
            items = self._scratch.new_items()
            cut_contexts(self.positions, items, plan, walk, window=scoring.window)

        def launch(table: torch.Tensor) -> None:
            kv = PagedKV(self._pool.k, self._pool.v, table)
            where = self._rows, self.positions, self._out
            attend_decode(self._queries, kv, *where, scoring, self._scratch, items, config=walk, plan=plan)

        tables = [self._tables[number % len(self._tables)] for number in range(max(16, len(self._tables)))]
        return Trial(setting, [partial(launch, table) for table in tables], self._out)

    def error(self, out: torch.Tensor) -> float:
        chosen = {0, self.streams - 1, self.streams // 2}
        table, last = self._tables[0], self._contexts[0] - 1
        wanted = {row: self._pool.reference(table, row, self._queries[row], last) for row in chosen}
        return max(relative_error(out[row], expected) for row, expected in wanted.items())


class _Chunk:
    """A prompt's tokens from its beginning on."""

    def __init__(self, model: Model, pool: Pool, tokens: int) -> None:
        self._model, self._pool, self._tokens = model, pool, tokens
        self._tables = pool.tables([tokens])[:8]
        self._queries, self._out = model.queries(tokens), model.outputs(tokens)
        kernel, _ = choose_prefill(model.shape, target_of(model.device))
        tiling = kernel.tiling(model.shape, tokens, model.num_sms)
        self.work = PrefillWork.of(PrefillTiles.build([0], [tokens], [0], [0], tiling), model.device)
        self._scratch = PrefillScratch(tiling, model.shape.head_dim, model.device)

    def trial(self, setting: Any, attend: Callable[..., None], **options: Any) -> Trial:
        def launch(table: torch.Tensor) -> None:
            kv = PagedKV(self._pool.k, self._pool.v, table)
            attend(self._queries, kv, self.work, self._out, self._model.scoring, self._scratch, **options)

        return Trial(setting, [partial(launch, table) for table in self._tables], self._out)

    def error(self, out: torch.Tensor) -> float:
        chosen = sorted({0, self._tokens // 2, self._tokens - 1})
        wanted = {token: self._pool.reference(self._tables[0], 0, self._queries[token], token) for token in chosen}
        return max(relative_error(out[token], expected) for token, expected in wanted.items())
