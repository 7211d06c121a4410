"""How a folder's weights are quantised: one value for every method. Which modules are, how each is stored, what their
inputs were meant to be rounded to, and what KV was."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property

from twostroke.models.quantised.name_patterns import NamePattern


class Layout(Enum):
    """How files name and pack a matrix and its scales (`models/weights/stored_layouts.py` reads them)."""

    PACKED_INTEGERS = auto()  # compressed-tensors, several a word of 32 bits
    PLAIN_INTEGERS = auto()  # compressed-tensors, one a byte
    FLOATS_OF_8 = auto()  # E4M3, one a byte
    PACKED_FP4 = auto()  # compressed-tensors, two a byte: NVFP4 and MXFP4
    GPTQ = auto()
    AWQ = auto()
    MXFP4_BLOCKS = auto()  # experts as gpt-oss stores them
    MODELOPT_FP4 = auto()


class Strategy(Enum):
    """What of a matrix shares a scale."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    GROUP = "group"
    BLOCK = "block"


@dataclass(frozen=True, slots=True)
class Activations:
    """What the file's makers meant the inputs of a matrix to be rounded to. A backend may compute in more."""

    kind: str
    """fp8, int8 or fp4."""
    strategy: str
    """What shares a scale: tensor, token or group."""
    is_dynamic: bool
    group_size: int | None = None
    scale: float | None = None
    """Of a whole tensor, where it was measured beforehand: a value is a code times it."""


@dataclass(frozen=True, slots=True)
class MatrixScheme:
    """How one kind of module stores its matrix."""

    layout: Layout
    bits: int
    strategy: Strategy
    group_size: int | None = None
    """Inputs that share a scale; None: not by groups."""
    block: tuple[int, int] | None = None
    """Rows and inputs that share a scale."""
    is_symmetric: bool = True
    has_order: bool = False
    """Whether inputs are in groups by an order of their own."""
    zeros_less_one: bool = False
    """Whether zero points are stored less one, as the first form of GPTQ files has them."""
    activations: Activations | None = None

    @property
    def format(self) -> str:
        """Its name among WEIGHT_FORMATS."""
        if self.layout in (Layout.MODELOPT_FP4, Layout.PACKED_FP4, Layout.MXFP4_BLOCKS):
            return "nvfp4" if self.group_size == 16 else "mxfp4"
        if self.layout is Layout.FLOATS_OF_8:
            return "fp8"
        return "int4" if self.bits == 4 and self.layout is not Layout.PLAIN_INTEGERS else "int8"


class Role(Enum):
    """What a module with a matrix is to the model."""

    LINEAR = auto()
    EXPERTS = auto()  # all of a layer's, stacked
    ROUTER = auto()
    HEAD = auto()
    EMBEDDING = auto()


class Expected(Enum):
    """Whether a module's matrix is quantised."""

    YES = auto()
    NO = auto()
    AS_STORED = auto()  # the config leaves it open


MAX_SEGMENTS = 16
"""Of a module's name."""


class Matching(Enum):
    EXACT = auto()  # a name, or "re:" and a regular expression; "Linear" is every matrix but an embedding
    SEGMENTS = auto()  # a run of a name's parts between dots, with * for anything; or "re:"


@dataclass(frozen=True)
class NameList:
    """Modules by name."""

    entries: tuple[str, ...]
    matching: Matching

    @cached_property
    def _patterns(self) -> tuple[NamePattern, ...]:
        found = [NamePattern.of(entry[3:]) for entry in self.entries if entry.startswith("re:")]
        if self.matching is Matching.SEGMENTS:
            found += [NamePattern.of(_pattern_of(entry)) for entry in self.entries if _is_glob(entry)]
        return tuple(found)

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.entries)

    def check(self) -> None:
        """Raises UnreadablePatternError."""
        _ = self._patterns

    def has(self, names: Sequence[str]) -> bool:
        """Whether a module that goes by these names is listed by its name."""
        for name in names:
            runs = _segment_runs(name) if self.matching is Matching.SEGMENTS else (name,)
            if not self._names.isdisjoint(runs):
                return True
        return any(pattern.matches(name) for pattern in self._patterns for name in names)

    @property
    def has_class(self) -> bool:
        return self.matching is Matching.EXACT and "Linear" in self.entries


def _is_glob(entry: str) -> bool:
    return "*" in entry and not entry.startswith("re:")


def _pattern_of(entry: str) -> str:
    name = ".*".join(re.escape(part) for part in entry.strip(".").split("*"))
    return rf"(.*\.)?{name}(\..*)?$"


def _segment_runs(name: str) -> set[str]:
    """Every part of a name from one dot to another."""
    parts = name.split(".")[:MAX_SEGMENTS]
    return {".".join(parts[first:last]) for first in range(len(parts)) for last in range(first + 1, len(parts) + 1)}


@dataclass(frozen=True)
class Rule:
    """Modules that are stored alike."""

    targets: NameList | None
    """None: all matrices of the layers."""
    scheme: MatrixScheme | None
    """None: those stay floats."""


@dataclass(frozen=True, slots=True)
class KVScheme:
    """What the file's makers meant KV to be kept in."""

    kind: str
    """fp8 or int8."""
    by_head: bool = False
    is_dynamic: bool = False


@dataclass(frozen=True)
class Quantisation:
    method: str
    source: str
    """The file and the setting that said so."""
    rules: tuple[Rule, ...]
    """The first that has a module's name decides; of those by class, the first."""
    ignore: NameList
    open_roles: frozenset[Role] = frozenset({Role.ROUTER, Role.EXPERTS})
    """Of modules that no rule names: these are as they are stored. Stacked experts are no module of the class Linear,
    of which most methods speak; their tools leave them as they are, and a start says so."""
    float_roles: frozenset[Role] = frozenset({Role.EMBEDDING})
    """And these are floats."""
    kv: KVScheme | None = None

    def scheme_of(self, names: Sequence[str], role: Role) -> tuple[MatrixScheme | None, Expected]:
        """Of a module that goes by these names; the scheme is None where it can only be floats."""
        if self.ignore.has(names) or (self.ignore.has_class and role is not Role.EMBEDDING):
            return None, Expected.NO
        for rule in self.rules:
            if rule.targets is not None and rule.targets.has(names):
                return rule.scheme, Expected.YES if rule.scheme is not None else Expected.NO
        general = next((rule for rule in self.rules if rule.targets is None or rule.targets.has_class), None)
        if general is None or general.scheme is None or role in self.float_roles:
            return None, Expected.NO
        return general.scheme, Expected.AS_STORED if role in self.open_roles else Expected.YES

    @property
    def schemes(self) -> tuple[MatrixScheme, ...]:
        return tuple(dict.fromkeys(rule.scheme for rule in self.rules if rule.scheme is not None))

    @property
    def format(self) -> str:
        """What most matrices are in, as a name of WEIGHT_FORMATS: that of the widest rule."""
        general = next((rule.scheme for rule in self.rules if rule.targets is None or rule.targets.has_class), None)
        return (general or self.schemes[0]).format
