"""The table of attention's settings: the first row that fits, and every row makes a setting that its kernel knows."""

import pytest

from twostroke.backends.cuda import attention_table
from twostroke.backends.cuda.attention_table import settings_for
from twostroke.backends.cuda.kernels.decode_cuts import CutRule
from twostroke.backends.cuda.kernels.flash_prefill import FlashOptions
from twostroke.backends.cuda.kernels.head_products import HeadTile
from twostroke.backends.cuda.kernels.latent_prefill import ContextConfig
from twostroke.backends.cuda.kernels.paged import WalkConfig

KERNELS = {
    "decode": WalkConfig,
    "decode cuts": CutRule,
    "flash prefill": lambda **settings: FlashOptions(128, **settings),
    "plain prefill": WalkConfig,
    "latent decode": WalkConfig,
    "latent context": ContextConfig,
    "latent chunk": WalkConfig,
    "latent heads": dict,
    "head products": HeadTile,
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_row_sets_its_kernel_and_the_last_is_for_all_else(kernel):
    rows = attention_table._rows()[kernel]
    for row in rows:
        KERNELS[kernel](**row["use"])
    assert rows[-1]["when"] == {} and all(row["when"] for row in rows[:-1])


def test_the_first_row_whose_ranges_hold_the_facts(monkeypatch):
    rows = [
        {"when": {"head_dim": [129, None]}, "use": {"block": 1}},
        {"when": {"tokens": [2, 8], "shared_bytes": [100, None]}, "use": {"block": 2}},
        {"when": {}, "use": {"block": 3}},
    ]
    monkeypatch.setattr(attention_table, "_rows", lambda: {"decode": rows, "narrow": rows[:1]})
    assert settings_for("decode", head_dim=256, tokens=4, shared_bytes=200) == {"block": 1}
    assert settings_for("decode", head_dim=128, tokens=4, shared_bytes=200) == {"block": 2}
    assert settings_for("decode", head_dim=128, tokens=4) == {"block": 2}, "who tells no limit has none"
    assert settings_for("decode", head_dim=128, tokens=4, shared_bytes=99) == {"block": 3}
    assert settings_for("decode", head_dim=128, tokens=9, shared_bytes=200) == {"block": 3}
    with pytest.raises(KeyError, match="no row"):
        settings_for("narrow", head_dim=64)
