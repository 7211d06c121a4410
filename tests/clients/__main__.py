"""`python -m tests.clients test|page|lock [NAME,NAME]`: install clients and try them, show the results on the page, or
write down what a client's environment holds."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.clients import page
from tests.clients.declared import ROOT, chosen
from tests.clients.install import InstallError, install, lock

USAGE = __doc__ or ""


def test(names: str) -> int:
    """Installs what is missing and tries each; one that cannot be installed is said, and the others are tried."""
    missing = []
    for client in chosen(names):
        try:
            install(client)
        except InstallError as error:
            missing.append(client.name)
            print(f"{client.name}: not installed: {error}", file=sys.stderr)
    command = [sys.executable, "-m", "pytest", "-m", "clients", "-v", "tests/clients"]
    settings = {**os.environ, "TWOSTROKE_TEST_CLIENTS": names}
    status = subprocess.run(command, cwd=ROOT, env=settings, check=False).returncode
    if missing:
        print(f"not installed, so not tried: {', '.join(missing)}", file=sys.stderr)
    return status or bool(missing)


def main(arguments: list[str]) -> int:
    names = arguments[1] if len(arguments) > 1 else ""
    match arguments[:1]:
        case ["test"]:
            return test(names)
        case ["page"]:
            page.record(chosen(names or ",".join(page.declared())))
            return 0
        case ["lock"] if names:
            for client in chosen(names):
                lock(client)
            return 0
    print(USAGE, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
