"""KV bytes against context: what a conversation takes of memory, beside the weights."""

from __future__ import annotations

from twostroke.cost.model_shape import ModelShape
from twostroke.lab.apparatus import Apparatus, CannotMeasureError
from twostroke.lab.chart import Axis, Chart, Mark, Panel, Series, Tone
from twostroke.lab.experiments.experiment import Experiment, Say, between
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


def _chart(shape: ModelShape, used: dict[int, int], weights: int) -> Chart:
    contexts, grid = tuple(map(float, used)), between(min(used), max(used))
    megabytes = 1e-6
    panel = Panel(
        Axis("context (tokens)", log=True),
        Axis("memory (MB)", log=True),
        (
            Series(
                Tone.MEMORY,
                Mark.MEASURED,
                contexts,
                tuple(value * megabytes for value in used.values()),
                "KV of one\nstream",
            ),
            Series(
                Tone.MEMORY,
                Mark.PREDICTED,
                tuple(map(float, grid)),
                tuple(shape.kv_bytes_read(context) * megabytes for context in grid),
            ),
            Series(Tone.PLAIN, Mark.LIMIT, (contexts[0], contexts[-1]), (weights * megabytes,) * 2, "weights"),
        ),
    )
    return Chart((panel,), prediction="predicted (bytes a token × tokens)")


def _finding(apparatus: Apparatus, used: dict[int, int]) -> Finding:
    shape, longest = apparatus.shape, max(used)
    weights, per_token = shape.weight_bytes_per_step, shape.kv_bytes_per_token
    if shape.experts is not None:
        weights += shape.experts.weight_bytes
    beyond = mean_error([shape.kv_bytes_read(context) for context in used], list(used.values()))
    block_size = apparatus.engine.scheduler.ledger.layout.block_size
    return Finding(
        chart=_chart(shape, used, weights),
        sentence=(
            f"Each token of context takes {size(per_token)}: {count(longest)} tokens hold {size(used[longest])}, "
            f"{share(used[longest] / weights)} of the weights' {size(weights)}, and {count(weights / per_token)} would "
            f"hold as much as those. The {size(apparatus.assembly.resolved.kv_bytes)} of KV set aside here are room "
            f"for {count(apparatus.pool_tokens)} tokens of all streams together. Whole blocks of {block_size} tokens "
            f"cost {share(beyond)} beyond the arithmetic on average."
        ),
        method=(
            "One stream alone; the blocks that it holds are counted after every step, and the most is kept. The line "
            "is keys and values of all layers, heads and positions in the kind they are stored in; windows count as "
            "far as they reach."
        ),
        numbers={
            "context_tokens": list(used),
            "kv_bytes": used,
            "kv_bytes_per_token": per_token,
            "weight_bytes": weights,
            "pool_tokens": apparatus.pool_tokens,
            "beyond_arithmetic": beyond,
        },
    )


EXPERIMENT = Experiment(
    "kv-memory",
    "KV memory against context",
    "How much memory does a conversation hold, and when is that more than the model?",
    measure,
)
