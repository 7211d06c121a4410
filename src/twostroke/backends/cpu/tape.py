"""Operations in the order that threads run them, each with the record that it is told."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from twostroke.backends.cpu.arguments import MOST_PIECES, TapeField, Wait
from twostroke.backends.cpu.compile import NativeCode
from twostroke.backends.cpu.memory import address_of
from twostroke.backends.cpu.packing import PackedMatrix

Record = npt.NDArray[np.int64]


class Tape:
    """Entries in the order they run."""

    def __init__(self, code: NativeCode) -> None:
        self._code = code
        self._entries: list[tuple[int, ...]] = []
        self.names: list[str] = []
        self.matrices: list[PackedMatrix | None] = []
        """What each entry multiplies by, if anything: for who wants to know what a step's time went to."""
        self._records: list[Record] = []

    def add(
        self,
        function: str,
        fields: Mapping[IntEnum, int],
        *,
        wait: Wait = Wait.ALWAYS,
        matrix: PackedMatrix | None = None,
        pieces: int = 1,
        pieces_of_many: int = 1,
        variant: str | None = None,
    ) -> None:
        """One operation; fields that are not given are 0. A stage is cut into pieces as its last entry says; with no
        pieces, every thread does this operation for itself before others of its stage. `variant`: of the code, which
        has the function for several sizes."""
        assert pieces <= MOST_PIECES and (pieces or wait is Wait.NEVER)
        record = np.zeros(max(fields) + 16, dtype=np.int64)
        for field, value in fields.items():
            record[field] = value
        self.names.append(function)
        self.matrices.append(matrix)
        self._records.append(record)  # keeps it where the tape points
        address = self._code.address(function, variant)
        self._entries.append((address, address_of(record), int(wait), pieces, pieces_of_many))

    def entries(self) -> Record:
        """[operations, fields of an entry]. The caller keeps the tape alive. At its end all threads are waited for,
        where rows stay with them too: whoever runs it reads what they wrote, and takes the step's record away."""
        assert len(TapeField) == 5
        found = np.array(self._entries, dtype=np.int64)
        found[-1, TapeField.WAIT] = Wait.ALWAYS
        return found
