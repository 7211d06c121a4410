"""Triton's interpreter, as the tests need it: with NumPy 2.4, and in half the time. For every launch and every value it
does work whose result is always the same (patches the language, builds a table of types, spells out a type's name);
here that is done once. What a kernel computes is untouched, but that float32 is
rounded to fewer bits as on a card."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

KNOWN_RELEASE = "3.6."
"""Whose constructors are replaced below; another Triton keeps its own, and is slower."""


def adapt() -> None:
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_for_numpy_2_4(tensor, scope):
        """Loop bounds are taken with `int(array)` from arrays of shape [1], which NumPy 2.4 refuses."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_for_numpy_2_4
    _round_to_nearest()
    if all(hasattr(interpreter, name) for name in ("_LangPatchScope", "_patch_lang", "_get_np_dtype")):
        _patch_the_language_once()
        _look_types_up_once()
    if triton.__version__.startswith(KNOWN_RELEASE):
        _work_shapes_out_once()
        _name_types_when_asked()
        _compute_no_checks_that_nobody_reads()


def _round_to_nearest() -> None:
    """Where the interpreter cuts off."""
    convert = interpreter._convert_float
    types = {tl.bfloat16: (torch.bfloat16, torch.uint16), tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8)}

    def convert_rounded(data, kind, target, mode):
        if kind != tl.float32 or target not in types:
            return convert(data, kind, target, mode)
        rounded, held = types[target]
        values = torch.from_numpy(np.ascontiguousarray(data).view(np.float32).reshape(np.shape(data)))
        return values.to(rounded).view(held).numpy()

    interpreter._convert_float = convert_rounded


def _patch_the_language_once() -> None:
    """And never take it back: where kernels are interpreted, nothing in the process is compiled."""

    class KeptPatches(interpreter._LangPatchScope):
        def restore(self) -> None:
            pass

    interpreter._LangPatchScope = KeptPatches
    patch = interpreter._patch_lang
    patched = {}

    def patch_once(function):
        seen = frozenset(name for name, value in function.__globals__.items() if value is tl or value is tl.core)
        if seen not in patched:
            patched[seen] = patch(function)
        return patched[seen]

    interpreter._patch_lang = patch_once


def _look_types_up_once() -> None:
    look_up = interpreter._get_np_dtype
    known = {}

    def numpy_type(kind):
        name = kind.scalar.name  # a block is held in the type of its elements
        if name not in known:
            known[name] = look_up(kind.scalar)
        return known[name]

    interpreter._get_np_dtype = numpy_type


def _compute_no_checks_that_nobody_reads() -> None:
    """Whether a sum of whole numbers overflows is worked out in eight more operations, and asserted only where the
    interpreter debugs."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _work_shapes_out_once() -> None:
    """Every value has a type, and every type a shape: a few dozen different ones in all."""
    make_block_type = tl.core.block_type.__init__
    shapes, shapes_of_tensors = {}, {}

    def make_block(self, element_ty, shape):
        key = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
        if key not in shapes:
            make_block_type(self, element_ty, shape)
            shapes[key] = (self.shape, self.numel)
        self.element_ty = element_ty
        self.shape, self.numel = shapes[key]

    def make_tensor(self, handle, kind):
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        key = tuple(kind.shape) if kind.is_block() else ()
        if key not in shapes_of_tensors:
            sizes = tl.core.tuple([tl.constexpr(size) for size in key])
            shapes_of_tensors[key] = (sizes, tl.constexpr(math.prod(key)))
        self.shape, self.numel = shapes_of_tensors[key]

    tl.core.block_type.__init__ = make_block
    tl.core.tensor.__init__ = make_tensor


def _name_types_when_asked() -> None:
    """Names are for messages."""

    def make_tuple(self, types, fields=None):
        self.types = types
        self.fields = fields or [""] * len(types)

    def tuple_name(self):
        return "[" + ",".join(f"{field}:{kind}" for field, kind in zip(self.fields, self.types, strict=True)) + "]"

    def ignore(self, name):
        """What a type would be called is worked out when it is asked for."""

    tl.core.tuple_type.__init__ = make_tuple
    tl.core.tuple_type.name = property(tuple_name)
    tl.core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>", ignore)
