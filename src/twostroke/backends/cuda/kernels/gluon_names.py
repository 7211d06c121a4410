"""What releases of Triton call by different names in Gluon, which is experimental there."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

meet = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
"""Every warp of a program waits for the others: `thread_barrier` in Triton 3.6, `barrier` since."""
