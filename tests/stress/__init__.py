"""Random trouble for an engine on a virtual clock, and for a real server, while a checker holds what must never change.
`python -m tests.stress --help` says how it is run; CONTRIBUTING.md says how a failure is replayed."""

TEST_SECONDS = 10.0
"""About how long `make test` keeps at it on a quiet core: a third on the virtual storey, some seconds on planted bugs,
the rest on a server's start and its engine's. `make stress SECONDS=3600` keeps at it for an hour."""
