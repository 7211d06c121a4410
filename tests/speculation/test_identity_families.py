"""A draft's logits have the bits that its token's would have without it, in every family on the CPU backend and in
kinds of weights that files bring: rows of experts, of latents, of windows, of each layer's own sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.backends.cpu import test_recurrent as recurrent
from tests.backends.driver import layout_for
from tests.models import kind_files, tiny_checkpoints
from tests.models.quantised.folders import make_quantised
from tests.models.tiny_checkpoints import make_tiny
from tests.speculation.test_identity_bits import Rewinding, drafted
from twostroke.backends.cpu import FACTORY
from twostroke.backends.host.host_backend import HostBackend
from twostroke.backends.interface import BackendSettings
from twostroke.core.formats import Formats
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.models.weights.tensor import WeightKind

POSITIONS = (3, 33, 50)
"""Of the slot's own token: drafts cross blocks and windows."""
MOST = 16
NUM_TOKENS = POSITIONS[-1] + 1 + MOST
THE_SAME = {"qwen3_5_vision": "qwen3_5", "lfm2_vl": "lfm2"}
"""Those whose text half is another variant."""
FOLDERS = [("fp8_block", "llama"), ("ct_mxfp4", "llama"), ("gptq", "qwen3_moe"), ("fp8_tensor", "mixtral")]


def has_states(checkpoint: Checkpoint) -> bool:
    return any(group.content == "state" for group in checkpoint.spec.kv_groups())


def check_drafts(checkpoint: Checkpoint, vocab_size: int) -> None:
    formats = FACTORY.formats(checkpoint)
    assert isinstance(formats, Formats), formats
    layout = layout_for(checkpoint.spec, NUM_TOKENS, 16)
    settings = BackendSettings(max_context=80, max_tokens_per_step=NUM_TOKENS, threads=2, formats=formats)
    backend = FACTORY.create(checkpoint, layout, settings)
    assert isinstance(backend, HostBackend)
    try:
        tokens = [int(token) for token in np.random.default_rng(7).integers(6, vocab_size, NUM_TOKENS)]
        driver = Rewinding(backend, tokens)
        for position in POSITIONS:
            driver.rewind(0)
            driver.prefill(position)
            plain = np.concatenate([driver.decode() for _ in range(1 + MOST)])
            # In coarse kinds a token that comes twice may have the same logits.
            assert np.isfinite(plain).all() and len({row.tobytes() for row in plain}) > MOST // 2
            for count in range(1, MOST + 1):
                assert np.array_equal(drafted(driver, position, count), plain[: 1 + count]), (position, count)
    finally:
        backend.close()


@pytest.mark.parametrize("variant", tiny_checkpoints.cpu_variants())
def test_every_family(variant: str, tmp_path: Path) -> None:
    """One that keeps states goes back over no token: another file has its drafts."""
    checkpoint = load_checkpoint(make_tiny(variant, tmp_path)[0])
    if has_states(checkpoint):
        assert THE_SAME.get(variant, variant) in recurrent.VARIANTS
    else:
        check_drafts(checkpoint, tiny_checkpoints.VOCAB_SIZE)


@pytest.mark.parametrize(
    "kind", [WeightKind.Q3_K, WeightKind.Q4_K, WeightKind.Q6_K, WeightKind.IQ4_XS, WeightKind.MXFP4]
)
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_kinds_of_files(kind: WeightKind, experts: bool, tmp_path: Path) -> None:
    model = kind_files.tiny_model(experts=experts)
    check_drafts(
        load_checkpoint(kind_files.write_of_kinds(model, tmp_path / "m.gguf", lambda _: kind)), kind_files.VOCAB_SIZE
    )


@pytest.mark.parametrize(("form", "variant"), FOLDERS)
def test_quantised_folders(form: str, variant: str, tmp_path: Path) -> None:
    check_drafts(load_checkpoint(make_quantised(form, tmp_path, variant)[0]), tiny_checkpoints.VOCAB_SIZE)
