"""The types that all packages share. Uses the standard library alone."""
