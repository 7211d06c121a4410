"""Every field of a spec is known to what declines models: a new one fails here until somebody has said who computes
it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

import pytest

from twostroke.models import features
from twostroke.models.features import ASKED_BY, BY_ALL, BY_RULE, KINDS, Feature
from twostroke.models.spec import Attention, ModelSpec

TABLES = (ASKED_BY, *({kind: names.split() for kind, names in table.items()} for table in (BY_RULE, BY_ALL)))


def parts_of(kind: type) -> Iterator[type]:
    """Itself, and all that it may hold, as its annotations say."""
    yield kind
    for hint in get_type_hints(kind).values():
        yield from (part for held in _held_in(hint) for part in parts_of(held))


def _held_in(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and is_dataclass(hint):
        yield hint
    for argument in get_args(hint):
        yield from _held_in(argument)


SPECS = tuple(dict.fromkeys(parts_of(ModelSpec)))


@pytest.mark.parametrize("kind", SPECS, ids=lambda kind: kind.__name__)
def test_every_field_is_asked_about_once(kind: type) -> None:
    known = [name for table in TABLES for name in table.get(kind, ())]
    assert sorted(known) == sorted(field.name for field in fields(kind))


def test_every_kind_of_attention_is_known_and_no_table_has_others() -> None:
    assert set(KINDS) == set(get_args(Attention))
    assert {kind for table in TABLES for kind in table} <= set(SPECS)


def test_every_feature_is_asked_by_some_field() -> None:
    asked = {feature for table in ASKED_BY.values() for feature in table.values()}
    assert asked | {kind for kind in KINDS.values() if kind is not None} == set(Feature)


def test_no_backend_but_the_reference_claims_whatever_there_is() -> None:
    """By name: what is taken from all Features but for some, or from those alone, claims each that is new."""
    uses = re.findall(r"^.*\b(?:EVERYTHING|set\(Feature\))(?=\W).*$", inspect.getsource(features), re.M)
    assert [line.split("#")[0].strip() for line in uses] == [
        "EVERYTHING = frozenset(Feature)",
        '"reference": EVERYTHING,',
    ]
