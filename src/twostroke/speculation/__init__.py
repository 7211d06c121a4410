"""Drafts: guesses at the tokens to come, which a backend verifies in the pass that it makes anyway."""
