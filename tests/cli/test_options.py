"""Options come from declarations: whatever builds an engine takes all of EngineConfig, and help shows it in panels."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.main import get_command
from typer.testing import CliRunner

from twostroke.cli import options
from twostroke.cli.app import COMMANDS
from twostroke.cli.options import PanelCommand, choices_of, expanded
from twostroke.config import EngineConfig, KVConfig
from twostroke.core.errors import BadRequestError
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.setting import integer, settings_of, switch
from twostroke.server.settings import Limits, ServerSettings

BUILDERS = (
    *("run", "chat", "serve", "bench", "lab", "calibrate", "simulate", "demo", "inspect", "embed", "train-drafter"),
)
"""Commands that build an engine, or decide what one would be."""
ENGINE_FLAGS = {choice.flag for choice in choices_of(EngineConfig())}


def command(name: str) -> Any:
    module = name.replace("-", "_")
    return expanded(getattr(import_module(f"twostroke.cli.{module}"), module))


def help_of(name: str) -> str:
    app = Typer(rich_markup_mode=None, add_completion=False)
    app.command(cls=PanelCommand)(command(name))
    done = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    return done.output


def test_every_field_of_the_config_is_an_option() -> None:
    paths = {choice.path for choice in choices_of(EngineConfig())}
    nested = {("kv", one.name) for one in fields(KVConfig)}
    assert paths == {(one.name,) for one in fields(EngineConfig) if one.name != "kv"} | nested
    assert {"--dtype", "--decode-weights", "--itl-target-ms", "--kv-memory", "--kv-type", "--run-ahead"} < ENGINE_FLAGS


@pytest.mark.parametrize("name", BUILDERS)
def test_every_command_that_builds_an_engine_has_them_all(name: str) -> None:
    taken = set(signature(command(name)).parameters)
    assert {choice.name for choice in choices_of(EngineConfig())} <= taken
    shown = help_of(name)
    assert all(f"  {flag}" in shown for flag in ENGINE_FLAGS)
    for panel in ("Engine:", "Formats:", "KV cache:"):
        assert shown.count(f"\n{panel}\n") == 1
    assert shown.index("\nOptions:\n") < shown.index("\nEngine:\n"), "a command's own options come first"


def test_run_draws_tokens_in_every_way_and_chat_in_all_that_suit_one_answer() -> None:
    not_typed = {"logit_bias", "grammar", "speculation"}  # a mapping and a grammar are no words of a command line
    own = {choice.path[0]: choice.name for choice in choices_of(SamplingParams())}
    assert set(own) == {one.name for one in fields(SamplingParams)} - not_typed
    assert set(own.values()) <= set(signature(command("run")).parameters)
    left_out = {own[name] for name in ("n", "logprobs", "prompt_logprobs")}
    assert set(own.values()) - set(signature(command("chat")).parameters) == left_out


def test_defaults_are_those_of_the_command_and_else_of_the_class() -> None:
    run, chat, bench = (signature(command(name)).parameters for name in ("run", "chat", "bench"))
    assert (run["max_tokens"].default, run["temperature"].default) == (256, 0.0)
    assert (chat["max_tokens"].default, chat["top_p"].default) == (512, 0.95)
    assert bench["max_running"].default == 256 and run["max_running"].default is None
    assert signature(command("serve")).parameters["max_body"].default == "8MiB"


def test_what_is_typed_arrives_in_the_class() -> None:
    arrived: list[Any] = []

    def try_it(config: EngineConfig = options.OWN, sampling: SamplingParams = SamplingParams()) -> None:  # noqa: B008
        arrived.extend((config, sampling))

    app = Typer(rich_markup_mode=None, add_completion=False)
    app.command(cls=PanelCommand)(expanded(try_it))
    typed = ["--threads", "3", "--kv-memory", "2GiB", "--kv-type", "int8", "--no-prefix-caching", "--quantise", "q4_1"]
    typed += ["--stop", "a", "--stop", "b", "--stop-token-id", "5", "--presence-penalty", "0.5", "--n", "2"]
    done = CliRunner().invoke(app, typed)
    assert done.exit_code == 0, done.output
    kv = KVConfig(memory_bytes=2 << 30, kind="int8", prefix_caching=False)
    assert arrived[0] == EngineConfig(threads=3, quantise="q4_1", kv=kv)
    assert arrived[1] == SamplingParams(stop=("a", "b"), stop_token_ids=(5,), presence_penalty=0.5, n=2)
    assert CliRunner().invoke(app, []).exit_code == 0 and arrived[2:] == [EngineConfig(), SamplingParams()]


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        (("--threads", "0"), "--threads must be an integer from 1 to 1024, not 0"),
        (("--block-size", "24"), "--block-size must be a multiple of 16 up to 256, not 24"),
        (("--kv-memory", "much"), "'much' is not a size, as --kv-memory takes it"),
        (("--kv-type", "fp3"), "--kv-type must be one of auto, f32, f16, bf16, fp8, int8, not 'fp3'"),
        (("--itl-target-ms", "nan"), "--itl-target-ms must be a number above 0, not nan"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_option(typed: tuple[str, ...], sentence: str) -> None:
    app = Typer(rich_markup_mode=None, add_completion=False)
    app.command(cls=PanelCommand)(command("calibrate"))
    refused = CliRunner().invoke(app, [*typed]).exception
    assert isinstance(refused, BadRequestError) and str(refused).startswith(sentence)


def test_a_server_offers_its_settings_and_limits() -> None:
    taken = set(signature(command("serve")).parameters)
    offered = {choice.name for choice in choices_of(ServerSettings("a"))}
    assert offered <= taken and {"port", "max_queue", "request_timeout", "cors", "engine_timeout"} < offered
    told = {name for name, setting in settings_of(Limits).items() if setting.help}
    assert "max_body_bytes" in told and "max_prompts" not in told, "some limits are checked and are no options"


DOCUMENTS = (
    "serving.md",
    "planning.md",
    "backends.md",
    "two-phases.md",
    "performance-gpu.md",
    "python.md",
    "metrics.md",
    "fleet.md",
)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_options_in_the_documents_are_there(name: str) -> None:
    flags: set[str] = set()
    for one in COMMANDS:
        app = Typer(rich_markup_mode=None, add_completion=False)
        app.command(cls=PanelCommand)(command(one))
        flags |= {flag for option in get_command(app).params for flag in (*option.opts, *option.secondary_opts)}
    text = (Path(__file__).parents[2] / "docs" / name).read_text(encoding="utf-8")
    quoted = " ".join(re.findall(r"`([^`\n]+)`", text))
    named = set(re.findall(r"(?<!\S)--[a-z][a-z-]+", quoted)) - {"--help"}
    assert named - flags == set()


@dataclass(frozen=True)
class Small:
    size: int = integer(1, 1, 9, "Own", "How large.")
    is_fast: bool = switch(False, "Own", "Hurry.", flag="--fast")


def test_a_setting_that_is_added_is_an_option_at_once() -> None:
    def try_it(small: Small = Small(size=4)) -> None:  # noqa: B008
        print(replace(small, size=small.size + 1))

    app = Typer(rich_markup_mode=None, add_completion=False)
    app.command(cls=PanelCommand)(expanded(try_it))
    assert "Small(size=5, is_fast=True)" in CliRunner().invoke(app, ["--fast"]).output
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100"}).output
    assert "\nOwn:\n" in shown and "How large.  [default: 4]" in shown and "--fast / --no-fast" in shown
