"""Measurements against other engines. Not part of the product; runs from a checkout."""
