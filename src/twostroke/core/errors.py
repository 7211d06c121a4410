"""The errors that are meant for a user: one clear sentence each. The CLI prints them and exits with 2;
anything else that escapes is a bug."""


class TwostrokeError(Exception):
    """Base of every error whose message is written for the user."""


class BadRequestError(TwostrokeError):
    """A request that can never be served: it names the field and what was wrong with it."""


class ModelError(TwostrokeError):
    """A model that cannot be found, read, or run: truncated, corrupt, hostile or unknown."""


class BackendError(TwostrokeError):
    """No backend can run this model here, or a backend failed; the message carries each reason."""


class BackendLostError(BackendError):
    """A backend that cannot go on, whatever it is asked: a process that it needs has ended. So does its engine."""


class PromiseError(TwostrokeError):
    """A request's class promises what cannot be kept now, and refuses rather than to be late."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """When it could have been kept, as predicted."""


def install_hint(extra: str) -> str:
    """How an extra is installed, from the folder that the source is in."""
    return f"pip install '.[{extra}]' in the folder of Twostroke's source installs it"
