"""Which variables a chat template reads: what a caller may tell it, such as whether the model is to think. The template
is parsed, never run."""

from __future__ import annotations

THINKING_SWITCHES = ("enable_thinking", "thinking")
"""What templates call the variable that turns thinking on and off."""
EFFORT = "reasoning_effort"
MAX_PARSED_CHARS = 128 * 1024
"""A stranger's template may be made to take long to parse; real ones are a tenth of this."""


def template_variables(source: str | None) -> frozenset[str]:
    """No template, or one that cannot be parsed, reads no variables."""
    if source is None or len(source) > MAX_PARSED_CHARS:
        return frozenset()
    import jinja2
    from jinja2 import meta

    from twostroke.text.template_environment import TemplateEnvironment

    try:
        return frozenset(meta.find_undeclared_variables(TemplateEnvironment().parse(source)))
    except (jinja2.TemplateError, RecursionError):
        return frozenset()


def thinking_variables(
    known: frozenset[str], *, is_wanted: bool | None, effort: str | None = None
) -> dict[str, bool | str]:
    """What a template that knows these variables is told; None leaves it to the template."""
    told: dict[str, bool | str] = {}
    if is_wanted is not None:
        told |= {name: is_wanted for name in THINKING_SWITCHES if name in known}
    if effort is not None and EFFORT in known:
        told[EFFORT] = effort
    return told
