"""Experiments on an engine: workloads, how they are played, and their figures beside what the hardware allows."""
