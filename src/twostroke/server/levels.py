"""Which class a request is served in: the one it names, where its API key may have that, else its key's own. Knows keys
by their names and beginnings; keeping what a class promises is the engine's matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from twostroke.core.errors import BadRequestError
from twostroke.core.service_level import DEFAULT_LEVEL, ServiceLevel, ServiceLevels
from twostroke.server.errors import ApiError, bad_request

UNDECIDED_TIERS = ("auto", "default", "standard", "standard_only")
"""Of OpenAI's `service_tier` and Anthropic's: they leave the choice to the server."""
ANY = "*"
SHOWN = 12
"""Characters of an entry that an error repeats: it may be a key."""


class LevelChoice:
    def __init__(
        self,
        levels: ServiceLevels,
        bound: Mapping[str, str] | None = None,
        api_keys: Sequence[str] = (),
        key_names: Sequence[str] = (),
    ) -> None:
        """`bound`: the class of a key's requests, by the key's name or by its beginning and a `*`; nothing: whoever
        asks may have any. A key that is bound may ask for classes that promise no more than its own, and a key that is
        not, while others are, for those that promise no more than the default. `key_names`: one a key, empty where it
        has none."""
        self._names = levels.names
        everything = (DEFAULT_LEVEL, *(name for name in levels.names if name != DEFAULT_LEVEL))
        names = key_names or [""] * len(api_keys)
        _check(bound or {}, api_keys, names)

        def allowed(key: str, name: str) -> tuple[str, ...]:
            if not bound:
                return everything
            own = levels.named(bound.get(_entry_of(key, name, bound), DEFAULT_LEVEL))
            return (own.name, *(other.name for other in levels.levels if other != own and promises_no_more(other, own)))

        self._of_keys = [allowed(key, name) for key, name in zip(api_keys, names, strict=True)]
        self._keyless = allowed("", "")

    def allowed(self, key: int) -> tuple[str, ...]:
        """By a key's number; -1 where none was asked for. The first is what it has without asking."""
        return self._of_keys[key] if 0 <= key < len(self._of_keys) else self._keyless

    def choose(self, key: int, wish: str | None, tier: str | None = None) -> str:
        """`wish`: the request's `service_level`; refused where it cannot be had. `tier`: its `service_tier`, which is
        taken where a class has that name and the key may have it, and else means nothing here."""
        allowed = self.allowed(key)
        if wish:
            if wish in allowed:
                return wish
            may = ", ".join(allowed)
            if wish in self._names:
                whose = "this API key" if key >= 0 else "a request without a key"
                message = f"service_level {wish!r} is not for {whose}, which may have {may}"
                raise ApiError(403, message, param="service_level", code="service_level_not_allowed")
            raise bad_request(f"service_level must be one of {may}, not {wish!r:.60}", "service_level")
        if tier is not None and tier not in UNDECIDED_TIERS and tier in allowed:
            return tier
        return allowed[0]


def promises_no_more(level: ServiceLevel, than: ServiceLevel) -> bool:
    """Neither an earlier first token, nor shorter gaps, nor a larger share. Of what is derived from the hardware nobody
    knows."""
    if level.is_derived:
        return False
    targets = ((level.ttft_s, than.ttft_s), (level.itl_s, than.itl_s))
    is_later = all(mine is None or (theirs is not None and mine >= theirs) for mine, theirs in targets)
    return is_later and level.weight <= than.weight


def _entry_of(key: str, name: str, entries: Mapping[str, str]) -> str:
    """The one that says most of a key; empty: none does."""
    if name and name in entries:
        return name
    fitting = [entry for entry in entries if entry.endswith(ANY) and key.startswith(entry.removesuffix(ANY))]
    return max(fitting, key=len, default="")


def _check(bound: Mapping[str, str], api_keys: Sequence[str], names: Sequence[str]) -> None:
    """A slip in a name would give its key another class, and nobody would know."""
    for entry in bound:
        if entry == ANY or entry in names or any(entry == _entry_of(key, "", {entry: ""}) for key in api_keys):
            continue
        shown = entry if len(entry) <= SHOWN else f"{entry[:SHOWN]}..."
        raise BadRequestError(
            f"the service levels bind a key {shown!r}, and no API key has that name: a name stands before its key, as "
            "in `NAME KEY`"
        )
