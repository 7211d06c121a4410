"""KV bytes against context: what a conversation takes of memory, beside the weights."""

from __future__ import annotations

from twostroke.lab.apparatus import Apparatus
from twostroke.lab.chart import Axis, Chart, Mark, Panel, Series, Tone
from twostroke.lab.experiments.experiment import CannotMeasureError, Experiment, Say, between
from twostroke.lab.finding import Finding
from twostroke.lab.prediction import mean_error
from twostroke.lab.wording import count, share, size

QUICK_CONTEXTS, CONTEXTS = (100, 500, 1000, 2000, 4000), (100, 500, 1000, 2000, 4000, 7000, 10_000)
OUT_TOKENS = 4


def measure(apparatus: Apparatus, say: Say) -> Finding:
    wanted = QUICK_CONTEXTS if apparatus.effort.is_quick else CONTEXTS
    lengths = apparatus.fitting(wanted, room=OUT_TOKENS)
    if len(lengths) < 2:
        raise CannotMeasureError("two context lengths are needed, and there is no time or no room for them")
    text = apparatus.prompt(lengths[-1])
    apparatus.forget()
    used: dict[int, int] = {}
    for length in lengths:
        say(f"{count(length)} tokens")
        # The last token written is never read: it has no KV.
        used[length + OUT_TOKENS - 1] = _most_used(apparatus, text[:length])
    return _finding(apparatus, used)


def _most_used(apparatus: Apparatus, prompt: list[int]) -> int:
    seen: list[int] = []
    apparatus.play([prompt], OUT_TOKENS, each_step=lambda: seen.append(_used_bytes(apparatus)))
    return max(seen)


def _used_bytes(apparatus: Apparatus) -> int:
    """Of KV blocks that running sequences hold."""
    scheduler = apparatus.engine.scheduler
    block_size = scheduler.ledger.layout.block_size
    groups = zip(scheduler.counts().blocks, apparatus.shape.kv_groups, strict=True)
    return sum(blocks.used * block_size * group.bytes_per_token for blocks, group in groups)


def _finding(apparatus: Apparatus, used: dict[int, int]) -> Finding:
    shape, contexts = apparatus.shape, list(used)
    weights, per_token = shape.weight_bytes_per_step, shape.kv_bytes_per_token
    if shape.experts is not None:
        weights += shape.experts.weight_bytes
    grid = between(contexts[0], contexts[-1])
    arithmetic = [shape.kv_bytes_read(context) for context in contexts]
    beyond = mean_error(arithmetic, list(used.values()))
    block_size = apparatus.engine.scheduler.ledger.layout.block_size
    megabytes = 1e-6
    ends = (float(contexts[0]), float(contexts[-1]))
    return Finding(
        chart=Chart(
            (
                Panel(
                    Axis("context (tokens)", log=True),
                    Axis("memory (MB)", log=True),
                    (
                        Series(
                            Tone.MEMORY,
                            Mark.MEASURED,
                            tuple(map(float, contexts)),
                            tuple(value * megabytes for value in used.values()),
                            "KV of one\nstream",
                        ),
                        Series(
                            Tone.MEMORY,
                            Mark.PREDICTED,
                            tuple(map(float, grid)),
                            tuple(shape.kv_bytes_read(context) * megabytes for context in grid),
                        ),
                        Series(Tone.PLAIN, Mark.LIMIT, ends, (weights * megabytes,) * 2, "weights"),
                    ),
                ),
            ),
            prediction="predicted (bytes a token × tokens)",
        ),
        sentence=(
            f"Each token of context takes {size(per_token)}: {count(contexts[-1])} tokens hold "
            f"{size(used[contexts[-1]])}, {share(used[contexts[-1]] / weights)} of the weights' {size(weights)}, and "
            f"{count(weights / per_token)} would hold as much as those. The "
            f"{size(apparatus.assembly.resolved.kv_bytes)} of KV set aside here are room for "
            f"{count(apparatus.pool_tokens)} tokens of all streams together. Whole blocks of {block_size} tokens cost "
            f"{share(beyond)} beyond the arithmetic on average."
        ),
        method=(
            "One stream alone; the blocks that it holds are counted after every step, and the most is kept. The line "
            "is keys and values of all layers, heads and positions in the kind they are stored in; windows count as "
            "far as they reach."
        ),
        numbers={
            "context_tokens": contexts,
            "kv_bytes": used,
            "kv_bytes_per_token": per_token,
            "weight_bytes": weights,
            "pool_tokens": apparatus.pool_tokens,
            "prediction_error": beyond,
        },
    )


EXPERIMENT = Experiment(
    "kv-memory",
    "KV memory against context",
    "How much memory does a conversation hold, and when is that more than the model?",
    measure,
)
