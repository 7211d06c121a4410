"""Whose prompts were read while a sample waited for its first token: a clock for each tenant, which a sample notes when
it comes and when it has its token. A few additions for each chunk. Knows no step but its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from twostroke.core.sequence import Sequence
from twostroke.core.step import Step


@dataclass(slots=True)
class _Mark:
    all_s: float
    tenant_s: float
    own_s: float = 0.0


class Readings:
    def __init__(self) -> None:
        self._all_s = 0.0
        self._by_tenant: dict[str, float] = {}
        self._marks: dict[int, _Mark] = {}  # by sequence id, of those that have a tenant and no token yet

    def begin(self, samples: Iterable[Sequence]) -> None:
        """These wait from now on."""
        for sequence in samples:
            if (tenant := sequence.request.tenant) and not sequence.num_output:
                self._marks[sequence.seq_id] = _Mark(self._all_s, self._by_tenant.get(tenant, 0.0))

    def note(self, step: Step, sequences: Mapping[int, Sequence], compute_s: float) -> None:
        """A step came back. Its seconds are split by tokens: those of chunks, and one a slot."""
        if not self._marks or not step.prefills:
            return
        token_s = compute_s / (sum(len(chunk.token_ids) for chunk in step.prefills) + len(step.decodes))
        for chunk in step.prefills:
            seconds, tenant = token_s * len(chunk.token_ids), sequences[chunk.seq_id].request.tenant
            self._all_s += seconds
            self._by_tenant[tenant] = self._by_tenant.get(tenant, 0.0) + seconds
            if (mark := self._marks.get(chunk.seq_id)) is not None:
                mark.own_s += seconds

    def end(self, sequence: Sequence) -> None:
        """It has its first token, or is gone; called again, nothing changes."""
        mark = self._marks.pop(sequence.seq_id, None)
        if mark is not None:
            record, tenant_s = sequence.timing.queue, self._by_tenant.get(sequence.request.tenant, 0.0) - mark.tenant_s
            record.kin_read_s = max(0.0, tenant_s - mark.own_s)
            record.others_read_s = max(0.0, self._all_s - mark.all_s - tenant_s)
        if not self._marks:
            self._by_tenant.clear()  # nobody looks back beyond this
            self._all_s = 0.0
