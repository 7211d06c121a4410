"""How Hypothesis tries a property. A plain run tries the same cases each time, so that it fails for what was changed
and for nothing else. `make fuzz` (the profile `search`) tries others each time, and more of them."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

USUAL = 100
"""How many cases a property gets that says nothing else."""
SEARCHED = 20 * USUAL

# How long a case takes says how busy the machine is, not whether the property holds.
UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}

settings.register_profile("fixed", max_examples=USUAL, derandomize=True, database=None, **UNTIMED)
settings.register_profile("search", max_examples=SEARCHED, database=None, print_blob=True, **UNTIMED)


def examples(count: int, *, allowed: tuple[HealthCheck, ...] = (), **more: Any) -> settings:
    """This many cases in a plain run, and in a search more in the same proportion."""
    count = count * settings.default.max_examples // USUAL
    return settings(max_examples=count, suppress_health_check=[HealthCheck.too_slow, *allowed], **more)


def load_fixed_profile() -> None:
    """The constants that Hypothesis takes from the package's own modules are left out: which modules are loaded
    depends on the tests that ran before in this process."""
    of_loaded_modules, none = providers._get_local_constants, providers.Constants()
    providers._get_local_constants = lambda: none if settings.default.derandomize else of_loaded_modules()
    settings.load_profile("fixed")
