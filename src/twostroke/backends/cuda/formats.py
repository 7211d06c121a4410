"""Which formats a model is held, multiplied and cached in on a device, or why that is not to be had. Knows no torch: a
plan asks here too."""

from __future__ import annotations

from dataclasses import replace

from twostroke.backends.cuda import device_here, kv_codes
from twostroke.backends.cuda.kernels.float8_tiles import in_float8
from twostroke.backends.cuda.kernels.packed_format import FP8, Code
from twostroke.backends.cuda.kernels.product import Product
from twostroke.backends.cuda.layer_matrices import matrices_of
from twostroke.backends.cuda.model_matrices import held_of, held_on
from twostroke.backends.cuda.stored_codes import QUANTISED_TO, Held
from twostroke.backends.cuda.tuned_table import Choices
from twostroke.core.formats import GPU_FLOATS, STORED, Formats, FormatWish
from twostroke.models.checkpoint import Checkpoint

NO_FLOAT8 = "this device multiplies no float8: that takes compute capability 8.9 or newer"


def formats_of(checkpoint: Checkpoint, wish: FormatWish) -> Formats | str:
    if wish.kv in kv_codes.ONE_BYTE:
        declined = kv_codes.declines(checkpoint, wish, lacks_float8=device_here.lacks_float8())
        in_few_bits = wish.weights in QUANTISED_TO or checkpoint.has_quantised_matrices
        is_open = wish.arithmetic == "fp8" or (wish.arithmetic is None and in_few_bits)
        arithmetic = wish.arithmetic if is_open and wish.weights not in GPU_FLOATS else "bf16"
        found = declined or formats_of(checkpoint, replace(wish, kv="bf16", arithmetic=arithmetic))
        if isinstance(found, str):
            return found
        return replace(found, kv=wish.kv, reasons=(*found.reasons, kv_codes.reason_of(checkpoint, wish.kv)))
    if wish.arithmetic == "fp8" and device_here.lacks_float8():
        return NO_FLOAT8
    if wish.weights not in (None, STORED, *GPU_FLOATS):
        return _quantised(checkpoint, wish)
    as_stored = _as_stored(checkpoint, wish)
    if isinstance(as_stored, Formats):
        return as_stored
    asked = wish.weights if wish.weights in GPU_FLOATS else None
    if asked and wish.arithmetic not in (None, asked):
        return f"it holds weights in what it computes in: {asked} needs --dtype {asked}"
    arithmetic = asked or wish.arithmetic or _stored_dtype(checkpoint)
    if arithmetic not in GPU_FLOATS:
        why = f", nor by weights as they are stored: {as_stored}" if as_stored and arithmetic == "fp8" else ""
        return f"it computes in bf16 or f16, not in {arithmetic}{why}"
    if wish.kv not in (None, *GPU_FLOATS):
        return f"it keeps KV in what it computes in, bf16 or f16, or in fp8 or int8, not in {wish.kv}"
    if wish.kv not in (None, arithmetic):
        return f"it keeps KV in what it computes in, {arithmetic}: {wish.kv} needs --dtype {wish.kv}"
    why = "asked for" if wish.arithmetic else "as the weights are stored, bf16 where that is no 16-bit float"
    stored, reasons = checkpoint.main_kind().name, (f"{arithmetic} {why}", *([as_stored] if as_stored else []))
    return Formats(arithmetic, arithmetic, arithmetic, stored=stored, reasons=reasons)


def _as_stored(checkpoint: Checkpoint, wish: FormatWish) -> Formats | str | None:
    """Layers' matrices in the few bits that they are stored in, where that is asked for or the device reads those
    fast; or why not, where there are such."""
    if not checkpoint.has_quantised_matrices or wish.weights in GPU_FLOATS:
        return None
    if wish.weights != STORED and not device_here.reads_few_bits():
        return "decode reads few bits fast on Hopper alone; --quantise none holds them as they are stored"
    if wish.arithmetic not in (None, "bf16", "fp8") or wish.kv not in (None, "bf16"):
        return "weights in few bits are multiplied in bf16 alone: they are brought to 16"
    formats = _in_few_bits(checkpoint, STORED, wish)
    held = held_of(checkpoint, formats)
    if not held.codes:
        return f"weights are brought to 16 bits: {next(iter(held.declined.values()))}"
    found = _multiplied(checkpoint, held, formats)
    if isinstance(found, str):
        return found
    formats, why = found
    named = tuple(sorted(set(held.declined.values())))
    reasons = (
        f"{why} (--quantise bf16 brings them to 16 bits)",
        *(f"some are brought to 16: {one}" for one in named),
    )
    return replace(formats, reasons=reasons)


def _quantised(checkpoint: Checkpoint, wish: FormatWish) -> Formats | str:
    """Float matrices of layers are brought to few bits as they are loaded."""
    if wish.weights not in QUANTISED_TO:
        return f"it brings weights to {', '.join(QUANTISED_TO)} as it loads them, not to {wish.weights}"
    if checkpoint.has_quantised_matrices:
        return f"its weights are stored in few bits: rounding them again to {wish.weights} would add an error"
    if wish.weights == "fp8" and device_here.lacks_float8():
        return NO_FLOAT8
    if wish.arithmetic not in (None, "bf16", "fp8") or wish.kv not in (None, "bf16"):
        return f"with weights in {wish.weights} it computes and keeps KV in bf16"
    formats = _in_few_bits(checkpoint, wish.weights, wish)
    found = _multiplied(checkpoint, held_of(checkpoint, formats), formats)
    if isinstance(found, str):
        return found
    return replace(found[0], reasons=(found[1],))


def _in_few_bits(checkpoint: Checkpoint, weights: str, wish: FormatWish) -> Formats:
    """What is multiplied in is not known yet where nobody asked for it."""
    rounds = False if wish.arithmetic == "bf16" else None
    stored = checkpoint.main_kind().name
    return Formats(weights, wish.arithmetic or "bf16", "bf16", stored=stored, inputs_in_float8=rounds)


def _multiplied(checkpoint: Checkpoint, held: Held, formats: Formats) -> tuple[Formats, str] | str:
    """What weights in few bits are multiplied in, in words, too; or why they are not in float8, where that was asked
    for."""
    if formats.inputs_in_float8 is False:
        return formats, "multiplied in bf16 as asked for"
    asked = replace(formats, arithmetic="fp8")
    in_layers = sum(one.kind != "head" for one in matrices_of(checkpoint.spec))
    has_float8, by_rows = not device_here.lacks_float8(), [name for name, code in held.codes.items() if code is FP8]
    if has_float8 and set(held.codes.values()) == {FP8} and len(by_rows) == in_layers:
        return asked, "prompts are multiplied in float8, few rows in bf16"
    others = len(held.in_float8)
    if formats.arithmetic == "fp8":
        if not by_rows and not others:
            return "none of its matrices is held in numbers that float8 has, so that it cannot multiply in fp8"
        all_told = len(by_rows) + others == in_layers
        rest = "few rows" if all_told else "few rows, and what float8 does not hold,"
        return asked, f"prompts are multiplied in float8, {rest} in bf16"
    if not has_float8:
        return formats, "multiplied in bf16"
    why = "multiplied in bf16"
    if by_rows:
        formats = replace(formats, inputs_in_float8=True)
        why = "prompts meet dense matrices in float8, all else is multiplied in bf16"
    if others and (told := _rounded_by_table(checkpoint, held)):
        formats = replace(formats, inputs_in_float8=True)
        why += f", but {told} (--dtype bf16: none; --dtype fp8: all that float8 holds)"
    elif others:
        why += ", but where `twostroke tune` found float8 faster for prompts (--dtype fp8: for all of them)"
    return formats, why


def _rounded_by_table(checkpoint: Checkpoint, held: Held) -> str:
    """How many matrices the table of the device that is here has multiplied in float8 unasked; nothing where those are
    none, or no device is here."""
    if (card := device_here.card_here()) is None:
        return ""
    on_card, choices = held_on(held, checkpoint.spec, card), Choices.on(card)
    able = [one for one in matrices_of(checkpoint.spec) if one.name in on_card.in_float8]

    def is_rounded(product: Product, code: Code) -> bool:
        lines = choices.later_lines(product, (in_float8(code), code.name), 0)
        return any(choice.kernel.form == in_float8(code) for _, choice in lines)

    found = {key: is_rounded(*key) for key in {(one.product, on_card.codes[one.name]) for one in able}}
    count = sum(found[one.product, on_card.codes[one.name]] for one in able)
    if not count:
        return ""
    return f"prompts meet {count} of {len(able)} matrices in float8, where the table for {card.name} has it faster"


def _stored_dtype(checkpoint: Checkpoint) -> str:
    """As the weights are stored, where that is a 16-bit float; bf16 otherwise."""
    kinds = {tensor.kind.name for name, tensor in checkpoint.tensors.items() if checkpoint.is_multiplied(name)}
    return "f16" if kinds == {"F16"} else "bf16"
