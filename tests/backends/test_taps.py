"""The residual stream after the layers that somebody asks for: transformers' own, on every backend, in both phases; and
who asks changes no logit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.backends.driver import Driver, layout_for
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends.cpu import FACTORY as CPU
from twostroke.backends.host.batch import Batch
from twostroke.backends.host.host_backend import HostBackend
from twostroke.backends.host.scores import Scores
from twostroke.backends.interface import BackendSettings, Companion, all_taps
from twostroke.backends.reference import FACTORY as REFERENCE
from twostroke.core.formats import Formats, FormatWish
from twostroke.core.kv_layout import KVLayout
from twostroke.core.step import PrefillChunk, Step
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint

TOKENS = [3 + (29 * place) % 240 for place in range(40)]
FACTORIES = {"reference": REFERENCE, "cpu": CPU}
KV, ERRORS = {"reference": "f32", "cpu": "f16"}, {"reference": 1e-5, "cpu": 0.01}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Any]:
    """A checkpoint, and the residual streams after its layers, by transformers."""
    folder, model = make_tiny("llama", tmp_path_factory.mktemp("taps"))
    streams: list[Any] = []
    for layer in model.model.layers:
        layer.register_forward_hook(
            lambda _layer, _inputs, output: streams.append(output[0] if isinstance(output, tuple) else output)
        )
    with torch.no_grad():
        model(input_ids=torch.tensor([TOKENS]), use_cache=False)
    return load_checkpoint(folder), [stream.reshape(len(TOKENS), -1).numpy() for stream in streams]


def make(name: str, checkpoint: Checkpoint, *taps: tuple[int, ...]) -> HostBackend:
    """A backend with a companion that asks for each of these."""
    factory = FACTORIES[name]
    formats = factory.formats(checkpoint, FormatWish(kv=KV[name]))
    assert isinstance(formats, Formats)
    own = layout_for(checkpoint.spec, 64, 16)
    groups = list(own.groups)
    companions = []
    for number, layers in enumerate(taps, start=1):
        companions.append(Companion("draft", checkpoint, formats, number, layers))
        groups += [replace(group, model=number) for group in own.groups]
    settings = BackendSettings(64, 64, companions=tuple(companions), formats=formats)
    backend = factory.create(checkpoint, KVLayout(16, tuple(groups)), settings)
    assert isinstance(backend, HostBackend)
    return backend


def passes(backend: HostBackend) -> list[tuple[range, list[int], Scores]]:
    """Two chunks, of which the second samples, and two decodes: of each its positions, those whose logits were wanted,
    and a copy of what it gave."""
    driver = Driver(backend, TOKENS)
    found = []
    for start, end, samples in ((0, 20, False), (20, 38, True)):
        chunk = PrefillChunk(0, start, tuple(TOKENS[start:end]), samples)
        found.append((range(start, end), [end - 1] if samples else [], Step(1, prefills=(chunk,))))
        driver.position = end
    results = [(where, wanted, _copied(backend, step)) for where, wanted, step in found]
    for position in (38, 39):
        driver.position = position
        step = Step(1, decodes=(driver.slot(),))
        results.append((range(position, position + 1), [position], _copied(backend, step)))
    return results


def _error(found: Any, expected: Any) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def _copied(backend: HostBackend, step: Step) -> Scores:
    scores = backend.score(Batch.from_step(step, backend.rows))
    assert scores.last_hidden is not None
    taps = tuple(tap.copy() for tap in scores.taps)
    return replace(scores, logits=scores.logits.copy(), taps=taps, last_hidden=scores.last_hidden.copy())


@pytest.mark.parametrize("name", list(FACTORIES))
@pytest.mark.parametrize("taps", [((0, 1),), ((2,), (0,)), ((1, 2), (1,))])
def test_taps_are_the_residual_stream(
    name: str, taps: tuple[tuple[int, ...], ...], tiny: tuple[Checkpoint, Any]
) -> None:
    checkpoint, streams = tiny
    backend, plain = make(name, checkpoint, *taps), make(name, checkpoint)
    try:
        layers = all_taps(tuple(Companion("draft", checkpoint, None, 1, own) for own in taps))  # type: ignore[arg-type]
        assert layers == tuple(sorted({layer for own in taps for layer in own}))
        for (where, wanted, scores), (_, _, without) in zip(passes(backend), passes(plain), strict=True):
            assert without.taps == () and len(scores.taps) == len(layers)
            for layer, tap in zip(layers, scores.taps, strict=True):
                assert _error(tap, streams[layer][list(where)]) < ERRORS[name]
            assert scores.last_hidden is not None and scores.last_hidden.shape == streams[-1][wanted].shape
            assert not wanted or _error(scores.last_hidden, streams[-1][wanted]) < ERRORS[name]
            assert scores.logits.tobytes() == without.logits.tobytes()
    finally:
        backend.close()
        plain.close()


def test_nobody_asks_and_nothing_is_copied(tiny: tuple[Checkpoint, Any]) -> None:
    """The tape has an entry more for each tap, and none otherwise."""
    lengths = {}
    for taps in ((), (0,), (0, 1)):
        backend = make("cpu", tiny[0], *([taps] if taps else []))
        lengths[taps] = len(backend.model._single_row.tape.names)  # type: ignore[attr-defined]
        backend.close()
    assert lengths[(0,)] == lengths[()] + 1 and lengths[(0, 1)] == lengths[()] + 2
