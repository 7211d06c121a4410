"""Generators of native code. Everything here imports `llvmlite.ir` and is itself imported only when compiled code is
not in the cache: `build.module_text` is the door."""
