"""What a server is told to be."""

from __future__ import annotations

import pytest

from twostroke.core.errors import BadRequestError
from twostroke.server.settings import ServerSettings


def test_a_model_may_have_several_names() -> None:
    settings = ServerSettings("org/a*", other_names=("b", "claude-*", "c[1]?*"))
    assert settings.listed_names == ["org/a*", "b"]
    for name in ("org/a*", "b", "claude-", "claude-x-1", "c[1]?", "c[1]?2"):
        assert settings.knows_model(name)
    for name in ("org/ab", "B", "bb", "claude", "c1x", "c[1]x", ""):
        assert not settings.knows_model(name)
    with pytest.raises(BadRequestError, match="name"):
        ServerSettings("a", other_names=("",))
