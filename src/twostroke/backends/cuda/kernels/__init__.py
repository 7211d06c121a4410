"""Triton kernels, each beside nothing it does not need: tensors in, tensors out."""
