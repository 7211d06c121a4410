"""`twostroke bench`: workloads on one engine, each figure beside its floor; `twostroke bench limits`: the floor's own
measurements."""

from __future__ import annotations

import dataclasses
import gc
import json
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from twostroke.cli import options, units
from twostroke.cli.notes import check_place, plain_name, say, write
from twostroke.config import EngineConfig
from twostroke.core.errors import BadRequestError
from twostroke.core.speculation import AUTO, OFF

if TYPE_CHECKING:
    from twostroke.engine.build import Assembly
    from twostroke.lab.bench import WorkloadResult
    from twostroke.lab.workload import Workload

CONFIG = EngineConfig(max_running=256)
"""What the widest workload has running at a time."""
MAX_REPETITIONS = 1000

ModelOrLimits = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|limits",
        help="A model as `run` takes it, or `limits`: measure what this machine allows at most, and run no model.",
    ),
]
Workloads = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Which, in which order, and in other sizes: single,batch or nano:n=8,single:prompt_len=64:reps=1; "
        "default: all.",
    ),
]
Scale = Annotated[
    str | None,
    typer.Option(
        metavar="full|small",
        help="full: the sizes that other engines are measured with; small: a couple of minutes on two cores. "
        "Default: full on cuda, small elsewhere.",
    ),
]
RecordFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Where the record goes; default: a new file in this folder."),
]


def bench(
    model: ModelOrLimits,
    workloads: Workloads = None,
    scale: Scale = None,
    repetitions: Annotated[int, typer.Option(help="Play each workload this often and show medians.")] = 1,
    json_path: RecordFile = None,
    config: EngineConfig = CONFIG,
    verbose: options.Verbose = False,
) -> None:
    """Measure an engine on workloads, each figure beside its floor: the best that this machine's measured bandwidth and
    arithmetic allow for that very work. The floor's share says how much of the hardware was used.

    \b
    single   one stream alone: TTFT (reading the prompt), TPOT (each token after)
    prefill  one long prompt: TTFT, bound by arithmetic
    batch    many requests of one length at once: tokens/s, and the gaps between a stream's tokens (ITL)
    prefix   one request after another behind a long shared prefix: TTFT cold, and when the cache has it
    noisy    streams decode when a long prompt arrives: how much their ITL suffers, how long the prompt takes
    online   requests arrive at random, as at a server: TTFT and ITL under load
    nano     256 requests of mixed lengths at once (nano-vLLM's benchmark): tokens/s

    Prompts are random and seeded, temperature 0.6, end tokens ignored, output lengths exact, no drafts; prefixes are
    forgotten in between. The table goes to standard output, a JSON record with machine, versions and command to a file.
    """
    console, notes = Console(), Console(stderr=True)
    if not 1 <= repetitions <= MAX_REPETITIONS:
        raise BadRequestError(f"repetitions must be from 1 to {MAX_REPETITIONS}, not {repetitions}")
    if config.speculate not in (AUTO, OFF):
        raise BadRequestError(
            "bench asks for no drafts, so that its figures compare; `twostroke lab MODEL --only speculation` measures "
            "what they bring"
        )
    if json_path is not None:
        check_place(json_path)
    if model == "limits":
        _limits(console, notes, config, json_path)
        return
    from twostroke.lab.sizes import SCALES, check_names, choose, scale_for

    if scale is not None and scale not in SCALES:
        raise BadRequestError(f"scale must be one of {', '.join(SCALES)}, not {scale!r:.60}")
    check_names(workloads)
    assembly, start = _start(model, config, notes, verbose)
    try:
        scale = scale or scale_for(assembly.backend_name)
        ceilings = assembly.ceilings()
        results, others_share = _play(assembly, choose(workloads, scale), repetitions, start, notes)
    finally:
        assembly.engine.close()
    from twostroke.cli.bench_table import print_results
    from twostroke.lab.record import bench_record

    print_results(console, results, start, ceilings, _heading(assembly, scale), repetitions)
    _warn_of_company(others_share, notes)
    record = bench_record(
        assembly, ceilings, results, scale=scale, repetitions=repetitions, start=start, others_share=others_share
    )
    _write(notes, json_path or _default_path(f"{assembly.checkpoint.name}-{assembly.backend_name}"), record)


def _play(
    assembly: Assembly,
    chosen: Sequence[Workload],
    repetitions: int,
    start: dict[str, float | None],
    notes: Console,
) -> tuple[list[WorkloadResult], float | None]:
    """What came of each workload, and the share of the cores' time that other processes took meanwhile. The first token
    of all is noted in `start`."""
    from twostroke.lab.bench import Bench
    from twostroke.lab.company import Company
    from twostroke.lab.short_prompts import short_prompt_warning

    bench = Bench(assembly.engine, assembly.checkpoint.spec.vocab_size, assembly.shape, assembly.ceilings())
    start["first_token_s"] = bench.first_token_s()
    company = Company.now()
    results = []
    for workload in chosen:
        # Lines only: a bar that moves while time counts would be measured with the rest.
        say(notes, f"{workload.NAME}: {workload.MEASURES}")
        if (warning := short_prompt_warning(workload)) is not None:
            say(notes, warning, "bold red")
        result = bench.run(workload, repetitions, lambda message: say(notes, f"  {message}"))
        results.append(result)
        say(notes, f"  skipped; {result.skipped}" if result.skipped else f"  {units.seconds(result.duration_s)}")
    return results, company.others_share()


def _warn_of_company(others_share: float | None, notes: Console) -> None:
    from twostroke.lab.company import BUSY

    if others_share is not None and others_share >= BUSY:
        warning = f"This machine was busy: other processes took {others_share:.0%} of its cores' time meanwhile. "
        warning += "The same figures are better on a quiet one."
        say(notes, warning, "bold red")


def _start(model: str, config: EngineConfig, notes: Console, verbose: bool) -> tuple[Assembly, dict[str, float | None]]:
    """An engine without text, and how long that took: from the process's start where the system tells it."""
    began_s = time.perf_counter()
    from twostroke.engine.build import build
    from twostroke.lab.record import process_age_s

    assembly = build(model, config, text=False)
    gc.collect()
    gc.freeze()  # as the server's engine process does
    age_s = process_age_s()
    ready_s = time.perf_counter() - began_s if age_s is None else age_s
    say(notes, f"{model}: ready after {units.seconds(ready_s)}")
    for note in assembly.notes if verbose else ():
        say(notes, f"  {note}")
    return assembly, {"ready_s": ready_s, "first_token_s": None}


def _heading(assembly: Assembly, scale: str) -> str:
    checkpoint = assembly.checkpoint
    weights = "random weights" if assembly.resolved.config.load == "random" else "its weights"
    sizes = (
        "full sizes, as other engines are measured with"
        if scale == "full"
        else "SMALL sizes, which compare with no other engine's figures (--scale full has those)"
    )
    shape, of_decodes = assembly.shape, ""
    if shape.decode_weights is not None:
        of_decodes = f" ({units.size(shape.dense_bytes_read(1))} of few tokens)"
    return (
        f"{checkpoint.name}: {checkpoint.spec.family}, {checkpoint.num_parameters / 1e6:,.0f}M parameters, {weights}, "
        f"{units.size(shape.weight_bytes_per_step)} a step{of_decodes}, on {assembly.backend_name} "
        f"with {assembly.resolved.threads} threads\n{sizes}"
    )


def _limits(console: Console, notes: Console, config: EngineConfig, json_path: Path | None) -> None:
    from twostroke.cli.bench_table import print_limits
    from twostroke.lab.limits import measure_limits
    from twostroke.lab.record import environment

    limits = measure_limits(config.backend, config.threads)
    print_limits(console, limits)
    _write(notes, json_path or _default_path("limits"), {**environment(), "limits": dataclasses.asdict(limits)})


def _default_path(name: str) -> Path:
    return Path(f"bench-{plain_name(Path(name).name)}-{datetime.now():%Y%m%d-%H%M%S}.json")


def _write(notes: Console, path: Path, record: dict[str, Any]) -> None:
    write(notes, path, json.dumps(record, indent=1, default=str) + "\n", "record")
