"""`python -m bench.peers`."""

from bench.peers.run import main

if __name__ == "__main__":
    raise SystemExit(main())
