"""Kernels on a card, one by one. Not part of the product; runs from a checkout."""
