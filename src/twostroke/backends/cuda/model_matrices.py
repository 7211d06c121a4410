"""The matrices of a model: which tensors each is made of, which are held in few bits, and which have a copy in twelve
bits for decode. Knows shapes and tables, no torch and no device at hand: a plan asks for a card elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

from twostroke.backends.cuda.kernels.expert_tiles import LEAST_UNPACKED_ROWS, MAX_PACKED_EXPERTS, in_thousandths
from twostroke.backends.cuda.kernels.float8_tiles import float8_bytes, in_float8, is_whole_in_float8
from twostroke.backends.cuda.kernels.gemv_config import GEMV_ROWS
from twostroke.backends.cuda.kernels.packed_format import LOW_BIT_DEPTH, UNIT_ROWS, Code, can_be_units
from twostroke.backends.cuda.kernels.product import Card, Product
from twostroke.backends.cuda.kernels.product_kernels import NEEDS_ROOM
from twostroke.backends.cuda.layer_matrices import ModelMatrix, layer_matrices, matrices_of
from twostroke.backends.cuda.stored_codes import (
    AS_COMPUTED,
    EXPERTS_TO,
    QUANTISED_TO,
    Held,
    Stored,
    as_units,
    is_low_bit,
    means_float8,
    stored_held,
)
from twostroke.backends.cuda.tuned_table import Choices
from twostroke.core.formats import STORED, Formats
from twostroke.cost.model_shape import DecodeWeights, WeightCopies
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.spec import (
    LatentAttention,
    ModelSpec,
    Recurrent,
    layer_name,
)

ELEMENT_BYTES = 2
"""Of a weight in the type that is computed in."""
MLP_KINDS = ("gate_up", "down", "shared_gate_up", "shared_down", "latent_down", "latent_up")
WHOLE_UNITS = (1, UNIT_ROWS, 32 * LOW_BIT_DEPTH)
"""A matrix that is compared in: without padding."""
MOST_OF_ROWS = 1.15
"""Times the bytes of experts by rows that units may take: what a file takes should still fit. Not so of two bits and of
three, which are held in four there."""
EXPANDS_IN_16_BITS = "latent attention reads what makes keys and values of its latents in 16 bits"
NEEDS_BF16 = "packed weights are bf16 in fewer bits, and this computes in f16"
ORDER_BYTES = 8
"""Of an input, where inputs have an order of their own."""
QUANTISING_BYTES_A_WEIGHT = 8
"""The matrix in bf16, and what finding its scales takes."""
NEEDS_HOPPER = "products with packed weights need a Hopper GPU (compute capability 9.0)"


def held_of(checkpoint: Checkpoint, formats: Formats) -> Held:
    """How layers' matrices are held, and the head where it is a matrix of its own that is stored in few bits. An
    embedding is in the type that is computed in, always."""
    if not is_low_bit(formats):
        return AS_COMPUTED
    spec = checkpoint.spec
    matrices = [one for index in range(spec.num_layers) for one in layer_matrices(spec, index)]
    is_stored = formats.weights == STORED
    as_computed = [one for one in matrices if _stays_in_16_bits(spec, one, is_stored=is_stored)]
    matrices = [one for one in matrices if one not in as_computed]
    if is_stored:
        found = stored_held(checkpoint, map(_stored, matrices))
        quantised = (one for one in as_computed if checkpoint.tensors[one.tensors[0]].kind.is_quantised)
        found = replace(found, declined={**found.declined, **{one.name: EXPANDS_IN_16_BITS for one in quantised}})
        code = _head_code(checkpoint)
        found = found if code is None else replace(found, codes={**found.codes, "head": code})
        return _in_float8(checkpoint, matrices, found, formats)
    experts = frozenset(matrix.name for matrix in matrices if matrix.product.experts)
    codes = {one.name: (EXPERTS_TO if one.name in experts else QUANTISED_TO)[formats.weights] for one in matrices}
    return _in_float8(checkpoint, matrices, Held(codes, experts=experts), formats)


def _in_float8(checkpoint: Checkpoint, matrices: Iterable[ModelMatrix], held: Held, formats: Formats) -> Held:
    """With those whose rows may be rounded to float8."""

    def is_meant(matrix: ModelMatrix) -> bool:
        if formats.inputs_in_float8 is False:
            return False
        if formats.arithmetic == "fp8" or formats.weights == "fp8":
            return True
        return formats.weights == STORED and all(means_float8(checkpoint.tensors[name]) for name in matrix.tensors)

    found = (one.name for one in matrices if _holds_in_float8(held.codes.get(one.name)) and is_meant(one))
    return replace(held, in_float8=frozenset(found))


def _holds_in_float8(code: Code | None) -> bool:
    """By rows or in units, as experts' codes are on different cards."""
    own = None if code is None or code.by_rows is None else as_units(code.by_rows)
    return any(one is not None and is_whole_in_float8(one) for one in (code, own))


def held_on(held: Held, spec: ModelSpec, card: Card) -> Held:
    """As a card's kernels take them: experts in units where it has those of Hopper, and by rows elsewhere."""
    codes = _with_units(held, spec) if card.has_hopper_kernels else held.codes
    in_float8 = frozenset(name for name in held.in_float8 if is_whole_in_float8(codes[name]))
    return replace(held, codes=codes, in_float8=in_float8)


def _with_units(held: Held, spec: ModelSpec) -> dict[str, Code]:
    codes = dict(held.codes)
    for index in range(spec.num_layers):
        for matrix in layer_matrices(spec, index):  # of experts `gate_up` is ahead of `down`
            if matrix.name not in held.experts or (code := codes.get(matrix.name)) is None:
                continue
            # The kernels of few tokens, which the first product is chosen for, read no second one in units.
            first = codes.get(layer_name(index, "gate_up"))
            if matrix.kind == "gate_up" or (first is not None and first.by_rows is None):
                codes[matrix.name] = _in_units(matrix.product, code, spec)
    return codes


def _in_units(product: Product, code: Code, spec: ModelSpec) -> Code:
    """The code itself, where its kernels do not take the product."""
    clamp = None if spec.moe is None else spec.moe.clamp
    if product.role == "activated":
        return code
    is_taken = can_be_units(product.shape, is_gated=product.is_gated) and product.experts <= MAX_PACKED_EXPERTS
    if not is_taken or code.by_rows is None or (clamp is not None and in_thousandths(clamp) is None):
        return code
    found = as_units(code.by_rows)
    if found is None or found.num_bytes(WHOLE_UNITS) > MOST_OF_ROWS * code.num_bytes(WHOLE_UNITS):
        return code
    return found


def _stays_in_16_bits(spec: ModelSpec, matrix: ModelMatrix, *, is_stored: bool) -> bool:
    """`expand` is read head by head, in floats. What was not stored in few bits is not brought to them around latents
    and states."""
    if matrix.kind == "expand":
        return True
    mixes = any(isinstance(layer.attention, LatentAttention | Recurrent) for layer in spec.layers)
    return mixes and not is_stored and matrix.kind not in MLP_KINDS


def _head_code(checkpoint: Checkpoint) -> Code | None:
    """Of numbers and scales as they are stored; None: it is held in the type that is computed in."""
    spec = checkpoint.spec
    if not spec.has_output or spec.tied_embeddings or not checkpoint.tensors["output"].kind.is_quantised:
        return None
    held = stored_held(checkpoint, [Stored("head", ("output",))])
    code = held.codes.get("head")
    return code if code is not None and code.grouping is not None and not held.with_order else None


def _stored(matrix: ModelMatrix) -> Stored:
    return Stored(matrix.name, matrix.tensors, bool(matrix.product.experts))


def held_weight_bytes(checkpoint: Checkpoint, formats: Formats, card: Card | None = None) -> int:
    """What all weights take on a device, without copies. `card`: where experts may lie in units."""
    held, spec = held_of(checkpoint, formats), checkpoint.spec
    if card is not None:
        held = held_on(held, spec, card)
    total = 2 * sum(prod(shape) for shape in spec.tensor_shapes().values())
    for matrix in matrices_of(spec):
        if (code := held.codes.get(matrix.name)) is not None:
            shape = matrix.product.shape
            total += code.num_bytes(shape) - 2 * prod(shape)
            total += ORDER_BYTES * shape[-1] if matrix.name in held.with_order else 0
    return total


def quantising_bytes(checkpoint: Checkpoint, formats: Formats) -> int:
    """What is needed beside all weights while the largest matrix is brought to few bits as it is loaded."""
    if not is_low_bit(formats):
        return 0
    matrices = [matrix for matrix in matrices_of(checkpoint.spec) if matrix.kind != "head"]
    dense = (prod(matrix.product.shape) for matrix in matrices if not matrix.product.experts)
    needed = QUANTISING_BYTES_A_WEIGHT * max(dense, default=0)
    if formats.weights == STORED:
        return needed  # experts come one by one
    experts = (prod(matrix.product.shape) for matrix in matrices if matrix.product.experts)
    return max(needed, 2 * ELEMENT_BYTES * max(experts, default=0))


def read_bytes(checkpoint: Checkpoint, name: str, formats: Formats) -> int:
    """What a step reads of a tensor: of 16 bits a weight, or of the code that its matrix is held in."""
    shape = checkpoint.tensors[name].shape
    code = _code_of_tensor(checkpoint, name, formats) if len(shape) == 2 else None
    return code.num_bytes(shape) if code is not None else ELEMENT_BYTES * prod(shape)


def _code_of_tensor(checkpoint: Checkpoint, name: str, formats: Formats) -> Code | None:
    if not is_low_bit(formats):
        return None
    known = _codes_of[0] if _codes_of else None  # another thread may ask about another model
    if known is None or known[0] is not checkpoint or known[1] != formats:
        held = held_of(checkpoint, formats)
        matrices = (one for one in matrices_of(checkpoint.spec) if one.name in held.codes)
        known = checkpoint, formats, {name: held.codes[one.name] for one in matrices for name in one.tensors}
        _codes_of[:] = [known]
    return known[2].get(name)


_codes_of: list[tuple[Checkpoint, Formats, dict[str, Code]]] = []
"""By tensor, of the checkpoint that was asked about last: whoever prices a model asks for each of its tensors."""


def unpacked_weights(spec: ModelSpec, held: Held, num_tokens: int, choices: Choices | None = None) -> int:
    """Of the largest matrix of all experts that steps of `num_tokens` tokens, at most, bring from units to another form
    first. `choices`: which of them are; None: all that may be."""
    moe = spec.moe
    if moe is None or (pairs := num_tokens * moe.experts_per_token) < LEAST_UNPACKED_ROWS * moe.num_experts:
        return 0
    found = {
        (one.product, code, one.name in held.in_float8)
        for one in matrices_of(spec)
        if one.name in held.experts and (code := held.codes.get(one.name)) is not None and code.by_rows is None
    }
    if choices is not None:
        found = {(one, code, rounds) for one, code, rounds in found if _needs_room(one, code, rounds, pairs, choices)}
    return max((numbers_of_room(one, code) for one, code, _ in found), default=0)


def _needs_room(product: Product, code: Code, may_be_rounded: bool, most_rows: int, choices: Choices) -> bool:
    forms = (in_float8(code), code.name) if may_be_rounded else (code.name,)
    lines = choices.later_lines(product, forms, 0)
    return any(rows <= most_rows and choice.kernel.name in NEEDS_ROOM for rows, choice in lines)


def numbers_of_room(product: Product, code: Code) -> int:
    """Of 16 bits, that it takes to bring such a matrix to them or to float8."""
    in_eights = float8_bytes(product.shape, code) if is_whole_in_float8(code) else 0
    return max(prod(product.shape), -(-in_eights // ELEMENT_BYTES))


def has_copy(matrix: ModelMatrix, choices: Choices) -> bool:
    """Whether decode reads a packed copy of it."""
    product = matrix.product
    if matrix.kind == "expand":  # which decode does not multiply by: it takes the heads one by one
        return False
    return choices.reads(product, "packed", (product.experts,) if product.experts else (1, 16, 64))


def with_copies(spec: ModelSpec, choices: Choices, held: Held = AS_COMPUTED) -> list[ModelMatrix]:
    """Of those that are not held in few bits. A head has one only where layers have, or are in fewer bits anyway."""
    found = [one for one in matrices_of(spec) if one.name not in held.codes and has_copy(one, choices)]
    return [] if [matrix.kind for matrix in found] == ["head"] and not held.codes else found


def offered_on(checkpoint: Checkpoint, formats: Formats, card: Card) -> DecodeWeights | str:
    """What copies for decode take on a card and spare its steps; or why there can be none."""
    if formats.weights != "bf16" and not is_low_bit(formats):
        return NEEDS_BF16
    if not card.has_hopper_kernels:
        return NEEDS_HOPPER
    return sizes_of(checkpoint, Choices.on(card), held_of(checkpoint, formats))


def sizes_of(checkpoint: Checkpoint, choices: Choices, held: Held = AS_COMPUTED) -> DecodeWeights | str:
    spec = checkpoint.spec
    matrices = with_copies(spec, choices, held)
    if not matrices and all(matrix.name in held.codes for matrix in matrices_of(spec)):
        return "all of its matrices are held in fewer bits than twelve"
    if not matrices:
        return "no matrix of this model has a size and shape that products with packed weights take"
    experts = [matrix for matrix in matrices if matrix.product.experts]
    head = [matrix for matrix in matrices if matrix.kind == "head"]
    layers = [matrix for matrix in matrices if matrix.kind != "head" and not matrix.product.experts]
    dense_bytes, replaced_bytes = _bytes(checkpoint, layers)
    head_bytes, head_replaced_bytes = _bytes(checkpoint, head)
    copies = WeightCopies(
        dense_bytes + head_bytes,
        replaced_bytes + head_replaced_bytes,
        max(_last_rows([*layers, *head], choices), default=0),
        plain_tokens=_plain_tokens(layers, choices),
        head_bytes=head_bytes,
        head_replaced_bytes=head_replaced_bytes,
    )
    moe = spec.moe
    return DecodeWeights(
        copies if copies.num_bytes else None,
        WeightCopies(*_bytes(checkpoint, experts), min(_last_rows(experts, choices)) // moe.experts_per_token)
        if experts and moe is not None
        else None,
    )


def _last_rows(matrices: Sequence[ModelMatrix], choices: Choices) -> list[int]:
    """Up to how many rows each reads its copy."""
    return [choices.last_rows(product, "packed") for product in {matrix.product for matrix in matrices}]


def _plain_tokens(matrices: Sequence[ModelMatrix], choices: Choices) -> int:
    """Up to how many tokens no product of a layer reads a copy: those that the fused kernels take, at most."""
    counts = range(1, GEMV_ROWS + 1)
    products = {matrix.product for matrix in matrices}
    read = [rows for rows in counts for product in products if choices.reads(product, "packed", (rows,))]
    return min(read, default=GEMV_ROWS + 1) - 1


def _bytes(checkpoint: Checkpoint, matrices: Sequence[ModelMatrix]) -> tuple[int, int]:
    """Of copies, and of what they are copies of."""
    replaced_bytes = ELEMENT_BYTES * sum(prod(matrix.product.shape) for matrix in matrices)
    return sum(matrix.packed_bytes for matrix in matrices), replaced_bytes
