"""What an event of a record must look like, field by field: a record is a file that anybody may have written, and the
page and `twostroke replay` read it without a second look. A field may be missing; one that is there is of its kind."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Check = Callable[[Any], bool]


def is_number(value: Any) -> bool:
    """Finite, and small enough for a browser's arithmetic."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def either(*checks: Check) -> Check:
    return lambda value: any(check(value) for check in checks)


def list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def row(*checks: Check) -> Check:
    """A list of just these."""
    return lambda value: (
        isinstance(value, list)
        and len(value) == len(checks)
        and all(check(one) for check, one in zip(checks, value, strict=True))
    )


def fields_of(check: Check) -> Check:
    """An object whose values are all of a kind."""
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


_WORK = list_of(row(is_whole, is_whole, is_whole, is_whole))
_POINT = or_none(row(is_number, is_number))
_PARTS = fields_of(or_none(either(is_number, is_text, is_flag)))
_RUNS = fields_of(list_of(row(is_whole, is_whole, is_text, is_whole)))


def _checked(check: Check, names: str) -> dict[str, Check]:
    return dict.fromkeys(names.split(), check)


SHAPES: dict[str, dict[str, Check]] = {
    "hello": {
        **_checked(is_text, "version model backend state page viewer own_prefix"),
        **_checked(is_whole, "block_size max_running max_tokens_per_step max_context"),
        **_checked(list_of(_PARTS), "groups levels"),
        **_checked(_PARTS, "ceilings shape"),
        "now_s": is_number,
        "itl_target_s": or_none(is_number),
        "draft_methods": list_of(is_text),
        "recorded": or_none(fields_of(is_text)),
    },
    "arrived": {
        **_checked(is_whole, "r prompt_tokens sample"),
        **_checked(is_text, "id level"),
        "at_s": is_number,
        "max_tokens": or_none(is_whole),
    },
    "admitted": {
        **_checked(is_whole, "r cached_tokens"),
        "at_s": is_number,
        "tiers": fields_of(is_whole),
        "break": or_none(_PARTS),
    },
    "step": {
        **_checked(is_whole, "id waiting running"),
        **_checked(is_number, "began_s done_s compute_s drafting_s"),
        **_checked(_WORK, "chunks slots"),
        "predicted_s": or_none(is_number),
        "preempted": list_of(is_whole),
        "intensity": fields_of(_POINT),
        "split": _POINT,
        "chunk_shares": list_of(is_number),
    },
    "kv": {
        "at_s": is_number,
        "groups": list_of(_RUNS),
        "hit_rate": or_none(is_number),
        "tiers": list_of(_PARTS),
    },
    "ended": {
        **_checked(is_whole, "r prompt_tokens output_tokens cached_tokens drafts_computed drafts_held"),
        **_checked(is_number, "at_s prefill_interference_s interference_s prefill_floor_s decode_floor_s"),
        **_checked(or_none(is_number), "queue_s prefill_s decode_s ttft_s tpot_s promised_ttft_s promised_itl_s"),
        **_checked(is_text, "reason level verdict cause"),
        **_checked(or_none(is_flag), "kept_ttft kept_itl"),
        "error": is_flag,
        "spans": list_of(row(is_text, is_number, is_number, is_text)),
        "token_times_s": list_of(is_number),
    },
    "control": {**_checked(is_flag, "paused stepping"), **_checked(is_text, "viewer_prefix reason")},
    "skipped": {"count": is_whole},
    "state": {"state": is_text},
}
"""By kind, and by the field's name. A field that is not named here is read by nobody."""


def is_event(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(kind := value.get("t"), str) or kind not in SHAPES:
        return False
    shape = SHAPES[kind]
    return all(shape[name](one) for name, one in value.items() if name in shape)


def finite(literal: str) -> float:
    """A number of a JSON text; raises ValueError where it is none that a browser could read."""
    number = float(literal)
    if not math.isfinite(number):
        raise ValueError(f"{literal:.20} is no number")
    return number
