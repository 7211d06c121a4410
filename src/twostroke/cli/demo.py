"""`twostroke demo`: a server on the default model, and the live page in a browser."""

from __future__ import annotations

import threading
import webbrowser
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from twostroke.cli import options
from twostroke.config import EngineConfig
from twostroke.core.errors import BackendError, install_hint

if TYPE_CHECKING:
    from twostroke.server.messages import Ready

DEFAULT_MODEL = "smollm2"
Model = Annotated[str, typer.Argument(metavar="[MODEL]", help="Another model than the default, smollm2.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")]
Open = Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")]


def demo(
    model: Model = DEFAULT_MODEL, port: Port = 0, open_page: Open = True, config: EngineConfig = options.OWN
) -> None:
    """Watch the two phases happen: start a server on this machine, and open its page.

    The page shows every step as it happens: prompts that are read in one go, answers that grow a token at a time,
    prefixes that are found again, drafts that hold. Chat in it, or press the buttons that show the classic
    situations. Nobody else can reach it. Ctrl-C ends it.
    """
    try:
        from twostroke.server.messages import EngineSettings
        from twostroke.server.run import serve
        from twostroke.server.settings import ServerSettings
    except ImportError as error:
        message = f"the demo needs the extra [server], and {error.name} is missing; {install_hint('server')}"
        raise BackendError(message) from None
    from twostroke.models.resolve import resolve

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    resolve(model, progress=console.print)
    settings = ServerSettings(model, port=port, page="full", drain_s=0.0)

    def on_ready(_: Ready, address: str) -> None:
        console.print(f"watch {model} at {address}/\nCtrl-C ends it")
        if open_page:  # aside: some browsers keep whoever starts them
            threading.Thread(target=_open, args=(f"{address}/", console), daemon=True).start()

    serve(EngineSettings(model, config), settings, on_ready)


def _open(url: str, console: Console) -> None:
    try:
        is_open = webbrowser.open(url)
    except webbrowser.Error:
        is_open = False
    if not is_open:
        console.print("no browser was found to open: open the address yourself")
