"""The CUDA backend: torch and Triton. Nothing outside this folder imports either."""
