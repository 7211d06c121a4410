"""What native operations of layers that keep a state are told: fields of argument records, as `arguments.py` has them
for all others."""

from __future__ import annotations

from enum import IntEnum, auto

from twostroke.backends.cpu.arguments import Field, OperandUser


class RunField(Field):
    """Tokens of one sequence that follow each other, and change its state one after the other."""

    ROW = auto()  # the first
    COUNT = auto()
    SEGMENT = auto()  # its row of a group's tables: entry 0 is the slot
    IS_FIRST = auto()  # 1: nothing of the sequence was computed before, the state begins as zeros
    ASIDE = auto()  # states after the second and later rows go to places from here on; -1: to the slot, as the first


class StateField(Field):
    """Where a layer's states lie: the first fields of each operation that changes them."""

    STATES = auto()  # f32 [slots, slot_floats]
    SLOT_FLOATS = auto()
    PART = auto()  # where in a slot the part begins that the operation changes, in floats
    ASIDE = auto()  # f32 [places, slot_floats]
    GROUP = auto()  # the first StepField of the layer's KV group


_AFTER_STATE = len(StateField)


class _StateUser(IntEnum):
    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[int]) -> int:
        return _AFTER_STATE + count


class ConvolutionField(_StateUser):
    """Each channel over its last few tokens; a state's part is [taps - 1, width], the oldest first."""

    INPUT = auto()  # f32 [rows, stride]
    STRIDE = auto()
    WIDTH = auto()
    IN_GATE = auto()  # of gated ones, f32 [rows, stride]: what inputs are multiplied by, and outputs
    OUT_GATE = auto()
    WEIGHT = auto()  # f32 [taps, width], the newest token's last
    BIAS = auto()  # f32 [width]
    OUTPUT = auto()  # f32 [rows, output_stride]
    OUTPUT_STRIDE = auto()


class DecayField(Field):
    """What makes the numbers of a recurrence from a token's projections, row by row."""

    STEPS = auto()  # f32 [rows, stride]: one a head, before its bias
    STRIDE = auto()
    STRENGTHS = auto()  # f32 [rows, stride]: of the delta rule, one a head, before its sigmoid
    NUM_HEADS = auto()
    STEP_BIAS = auto()  # f32 [heads]
    RATES = auto()  # f32 [heads]: how fast a state fades, above 0
    SHORTEST = auto()
    LONGEST = auto()
    OUTPUT = auto()  # f32 [rows, 2, heads to a multiple of 16]: what states are multiplied by, what values are
    KEYS = auto()  # of the delta rule, f32 [rows, keys_stride]: queries, then keys, brought to length 1 in place
    KEYS_STRIDE = auto()
    NUM_KEY_HEADS = auto()
    KEY_DIM = auto()
    QUERY_SCALE = auto()
    ROWS = auto()


class RecurrenceField(_StateUser):
    """A matrix a head, [key_dim, value_dim] in blocks of 16 values: [value_dim / 16, key_dim, 16]."""

    QUERIES = auto()  # f32 [rows, stride]
    KEYS = auto()
    VALUES = auto()
    STRIDE = auto()
    DECAYS = auto()  # f32 [rows, 2, heads to a multiple of 16]
    NUM_HEADS = auto()
    HEADS_A_KEY = auto()  # that share queries and keys, in order; 0: head i has those of i modulo NUM_KEY_HEADS
    NUM_KEY_HEADS = auto()
    KEY_DIM = auto()
    VALUE_DIM = auto()
    SKIP = auto()  # f32 [heads]: of values that are added to what is read
    OUTPUT = auto()  # f32 [rows, num_heads * value_dim]


class GatedNormField(OperandUser):
    INPUT = auto()  # f32 [rows, width]
    WIDTH = auto()
    PART = auto()  # of the width, what is normed together
    GATE = auto()  # f32 [rows, gate_stride]
    GATE_STRIDE = auto()
    WEIGHT = auto()  # f32 [width]
    EPSILON = auto()
    ROWS = auto()
    GATHER = auto()  # prepare_gated: 1: the rows are those of StepField.LOGIT_ROWS
