"""The errors that are meant for a user: one clear sentence each. The CLI prints them and exits with 2;
anything else that escapes is a bug."""


class TwostrokeError(Exception):
    """Base of every error whose message is written for the user."""


class BadRequestError(TwostrokeError):
    """A request can never be served. The message names the field and what was wrong with it."""


class ModelError(TwostrokeError):
    """A model cannot be found, read, or run: it is truncated, corrupt, hostile or unknown."""


class BackendError(TwostrokeError):
    """No backend can run this model here, or a backend failed; the message carries each reason."""


class BackendLostError(BackendError):
    """A backend cannot go on, whatever it is asked, because a process that it needs has ended. Its engine ends, too."""


class PromiseError(TwostrokeError):
    """The promise of a request's class cannot be kept now, and the class says to refuse such a request at once."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """In how many seconds the promise could be kept, as predicted."""


def install_hint(extra: str) -> str:
    """Returns a sentence that says how an extra is installed, from the folder that the source is in."""
    return f"pip install '.[{extra}]' in the folder of Twostroke's source installs it"
