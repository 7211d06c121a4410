"""Options from declarations: where a command takes a class of settings (EngineConfig, SamplingParams, ...), each field
is an option, grouped in panels, and the command is given the class filled in. Knows no setting by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperCommand

from twostroke.config import EngineConfig
from twostroke.core.errors import BadRequestError
from twostroke.core.setting import Setting, settings_of

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A short name (smollm2), a path to a .gguf file or a Hugging Face folder, or a Hub id (org/name).",
    ),
]
System = Annotated[str | None, typer.Option(help="A system message for the chat template.")]
ServiceLevel = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="The class of --service-levels whose promise the request gets; default: the class default."
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say what was chosen, and why.")]
OWN = EngineConfig()
"""Every choice left open."""

_TYPES: dict[str, type] = {"integer": int, "number": float, "switch": bool, "texts": list[str], "integers": list[int]}
"""Of values as they are typed; others are text."""
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}
_UNITS = {"": 1, "B": 1} | {f"{name}B": 1000**power for name, power in _POWERS.items()}
_UNITS |= {f"{name}IB": 1024**power for name, power in _POWERS.items()}


@dataclass(frozen=True, slots=True)
class Choice:
    """A setting as a command has it."""

    path: tuple[str, ...]
    """Its field, behind those of the classes around it."""
    setting: Setting
    default: Any

    @property
    def flag(self) -> str:
        return self.setting.flag or "--" + self.path[-1].replace("_", "-")

    @property
    def name(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def parameter(self) -> Parameter:
        """As typer reads it."""
        kind: Any = _TYPES.get(self.setting.kind, str)
        default = _as_typed(self.setting, self.default)
        told = _option(self.setting, self.flag, self.setting.panel)
        return Parameter(self.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind | None, told])

    def value(self, typed: Any) -> Any:
        """Checked, and refused by the name of the option."""
        kind = self.setting.kind
        if kind in ("texts", "integers"):
            typed = tuple(typed or ())
        elif kind == "size" and typed is not None:
            typed = parse_size(typed, self.flag)
        self.setting.check(self.flag, typed)
        return typed


@dataclass(frozen=True, slots=True)
class Without:
    """Settings that a command does not offer: `Annotated[SamplingParams, Without("n")]`."""

    names: tuple[str, ...]


def choices_of(defaults: Any, path: tuple[str, ...] = ()) -> Iterator[Choice]:
    """Of a class of settings, and of those within it; `defaults`: one of it."""
    settings = settings_of(type(defaults))
    for one in fields(defaults):
        own, value = (*path, one.name), getattr(defaults, one.name)
        if one.name in settings and settings[one.name].help:
            yield Choice(own, settings[one.name], value)
        elif is_dataclass(value):
            yield from choices_of(value, own)


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """The same command with an option for each setting of the classes among its parameters. A parameter's default says
    what the options' are."""
    parameters: list[Parameter] = []
    groups: dict[str, tuple[Any, list[Choice]]] = {}
    for parameter in signature(command, eval_str=True).parameters.values():
        kind, *rest = get_args(parameter.annotation) or [parameter.annotation]
        if is_dataclass(kind):
            left_out = {name for one in rest if isinstance(one, Without) for name in one.names}
            offered = [one for one in choices_of(parameter.default) if one.path[-1] not in left_out]
            groups[parameter.name] = parameter.default, offered
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))

    def run(**typed: Any) -> None:
        for name, (defaults, choices) in groups.items():
            typed[name] = _filled(defaults, {one.path: one.value(typed.pop(one.name)) for one in choices})
        command(**typed)

    parameters += [one.parameter for _, choices in groups.values() for one in choices]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def typed_again(settings: Any, defaults: Any) -> list[str]:
    """The options that bring another command the same settings, of which `defaults` are its own."""
    typed: list[str] = []
    own = {choice.path: choice.default for choice in choices_of(defaults)}
    for choice in choices_of(settings):
        kind, value = choice.setting.kind, choice.default
        if value == own[choice.path]:
            continue
        if kind == "switch":
            typed.append(choice.flag if value else f"--no-{choice.flag[2:]}")
        else:
            values = value if kind in ("texts", "integers") else (_as_typed(choice.setting, value),)
            typed += [part for one in values for part in (choice.flag, str(one))]
    return typed


def _filled(defaults: Any, given: Mapping[tuple[str, ...], Any]) -> Any:
    changes: dict[str, Any] = {path[0]: value for path, value in given.items() if len(path) == 1}
    for name in {path[0] for path in given if len(path) > 1}:
        changes[name] = _filled(
            getattr(defaults, name), {path[1:]: value for path, value in given.items() if path[0] == name}
        )
    return replace(defaults, **changes)


def _option(setting: Setting, flag: str, panel: str | None = None) -> Any:
    flags = f"{flag}/--no-{flag[2:]}" if setting.kind == "switch" else flag
    names = (flags,) if setting.other_flag is None else (flags, setting.other_flag)
    return typer.Option(*names, metavar=setting.metavar, help=setting.help, rich_help_panel=panel)


def engine_option(name: str) -> Any:
    """One of EngineConfig's, for a command that builds no engine and takes no more of them."""
    return _option(settings_of(EngineConfig)[name], "--" + name.replace("_", "-"))


class PanelCommand(TyperCommand):
    """A command whose help has its own options first, then a section a panel."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                own = "Arguments" if parameter.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or own, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _as_typed(setting: Setting, value: Any) -> Any:
    """A default as a user would write it."""
    if setting.kind == "size" and value is not None:
        unit = next(unit for unit in ("GIB", "MIB", "KIB", "B") if value % _UNITS[unit] == 0)
        return f"{value // _UNITS[unit]}{unit.replace('I', 'i')}"
    return list(value) or None if setting.kind in ("texts", "integers") else value


def parse_size(text: str, name: str = "it") -> int:
    """Bytes of "512MB", "2 GiB", "1000000"."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*", text)
    unit = match.group(2).upper() if match else None
    if match is None or unit not in _UNITS:
        raise BadRequestError(f"{text!r} is not a size, as {name} takes it: write something like 512MB or 2GiB")
    return int(float(match.group(1)) * _UNITS[unit])
