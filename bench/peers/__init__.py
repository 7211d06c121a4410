"""Twostroke beside its CPU peers, in one run: `python -m bench.peers`. Start at `run.py`; `engines.py` says who takes
part, `adapters/` how each is driven, `guard.py` how a busy machine is noticed."""
