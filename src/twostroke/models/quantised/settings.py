"""What every method's settings are read with: lists of names, and refusals that say which setting is not understood."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from twostroke.models.families.fields import Fields, shown
from twostroke.models.quantised.name_patterns import UnreadablePatternError
from twostroke.models.quantised.scheme import Activations, Matching, NameList

MAX_ENTRIES = 100_000
MAX_GROUP = 2**20


def one_of(fields: Fields, name: str, allowed: Iterable[str], default: str | None = None) -> str:
    """A word that is understood."""
    value = fields.text(name, default)
    known = tuple(allowed)
    if value.lower() not in known:
        raise fields.error(name, f"is {shown(value)}, which is not understood here; these are: {', '.join(known)}")
    return value.lower()


def words(fields: Fields, name: str) -> tuple[str, ...]:
    """A list of strings; nothing where nothing is said."""
    value = fields.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_ENTRIES or not all(isinstance(entry, str) for entry in value):
        raise fields.error(name, f"must be a list of strings, not {shown(value)}")
    return tuple(value)


def name_list(fields: Fields, name: str, matching: Matching) -> NameList:
    return checked(fields, name, NameList(words(fields, name), matching))


def checked(fields: Fields, name: str, found: NameList) -> NameList:
    try:
        found.check()
    except UnreadablePatternError as error:
        raise fields.error(name, f"holds a pattern that {error}") from None
    return found


def refuse_others(fields: Fields, read: Iterable[str], of_no_matter: Iterable[str] = ()) -> None:
    """A setting that nobody here knows may change what weights mean."""
    known = {*read, *of_no_matter}
    for name, value in fields.values.items():
        if name not in known and value not in (None, False, [], {}):
            raise fields.error(str(name)[:60], f"is {shown(value)}, and this setting is not understood here")


def block_of(fields: Fields, name: str) -> tuple[int, int] | None:
    """Rows and inputs of a block."""
    value = fields.get(name)
    if value is None:
        return None
    sizes: Any = value
    if isinstance(value, str):
        sizes = [int(part) if part.isdecimal() and len(part) < 8 else None for part in value.split("x")]
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(s) is int and 0 < s <= MAX_GROUP for s in sizes):
        raise fields.error(name, f"must be two sizes from 1 to {MAX_GROUP}, not {shown(value)}")
    return sizes[0], sizes[1]


def fp8_activations(is_dynamic: bool, group_size: int | None = None, by_token: bool = False) -> Activations:
    if group_size is not None:
        return Activations("fp8", "group", is_dynamic, group_size)
    return Activations("fp8", "token" if by_token else "tensor", is_dynamic)


def section(fields: Fields, name: str, value: object) -> Fields:
    """Settings that are nested under a name that the file chose."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise fields.error(name, f"must be an object, not {shown(value)}")
    plain: Mapping[str, Any] = value
    own = name[:60] if name.isprintable() else shown(name)
    return Fields(f"{fields.source}: {fields.prefix}{own}", plain)
