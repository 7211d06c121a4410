"""How a server finds its place in a fleet: what its settings and the environment say of its router."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from urllib.parse import urlsplit

import msgspec

from twostroke.cluster.endpoints import WILDCARDS
from twostroke.cluster.registration import Registration
from twostroke.cluster.role import Role
from twostroke.cluster.router_client import ROUTER_KEY_VARIABLE, RouterClient
from twostroke.core.errors import BadRequestError
from twostroke.server.log import log
from twostroke.server.messages import EngineSettings
from twostroke.server.settings import ServerSettings


def with_names(engine: EngineSettings, settings: ServerSettings, address: str) -> EngineSettings:
    """In a fleet, with what a router may call this server: vllm-router names whoever will write by its address."""
    if engine.fleet is None:
        return engine
    known = (urlsplit(url).netloc for url in (settings.advertise, address) if url is not None)
    return msgspec.structs.replace(engine, fleet=replace(engine.fleet, names=tuple(dict.fromkeys(known))))


def registration_of(settings: ServerSettings, address: str) -> Registration | None:
    """None: there is no router to be added to. `address`: where this server listens."""
    if settings.register is None:
        return None
    url = settings.advertise or address
    if urlsplit(url).hostname in WILDCARDS:
        raise BadRequestError(f"--register needs --advertise URL: nobody reaches a server by {address}")
    router = RouterClient(settings.register, os.environ.get(ROUTER_KEY_VARIABLE))
    return Registration(router, url, Role(settings.role or Role.BOTH), log, api_key=settings.look_key)


def with_look_key(settings: ServerSettings) -> ServerSettings:
    """Where keys are asked for, with one of its own for the router, which asks for models and loads. It opens nothing
    else: smg sends it with requests that came without a key, too."""
    if settings.register is None or not settings.api_keys:
        return settings
    return replace(settings, look_key=secrets.token_urlsafe(32))
