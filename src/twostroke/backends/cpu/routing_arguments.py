"""What the operations that send rows to experts are told: fields of argument records, as in `arguments.py`."""

from __future__ import annotations

from enum import auto

from twostroke.backends.cpu.arguments import Field, OperandUser


class RouteField(Field):
    """Of a router's numbers, which experts each row is sent to, and by which shares (`models.spec.Routing`)."""

    LOGITS = auto()  # f32 [rows, stride]
    STRIDE = auto()
    NUM_EXPERTS = auto()
    PER_TOKEN = auto()
    IS_SIGMOID = auto()  # 0: a softmax
    CORRECTION = auto()  # f32 [experts], or 0
    NUM_GROUPS = auto()
    GROUPS_PER_TOKEN = auto()
    RANKED_BY = auto()
    NORMALISES = auto()
    SHARE_SCALE = auto()
    EXPERT_SCALES = auto()  # f32 [experts] what an expert's share is multiplied by besides, or 0
    ROWS = auto()
    CHOSEN = auto()  # i64 [rows, per_token]
    SHARES = auto()  # f32 [rows, per_token]


class PlanPlace(Field):
    """What is known of a layer's experts once rows are grouped, in i64: where products look for their rows."""

    NUM_MET = auto()
    NUM_ROWS = auto()  # of all of them, with what lies between
    ONE = auto()
    COUNTS = auto()  # of each met expert's rows, from here on


class GroupField(Field):
    CHOSEN = auto()
    PER_TOKEN = auto()
    FIRST_HELD = auto()  # the first expert that is held here
    NUM_HELD = auto()
    ROWS = auto()
    PLACES = auto()  # i64 [rows, per_token] where a row lies among those of all experts, or ELSEWHERE
    PLAN = auto()  # i64, see PlanPlace
    MET = auto()  # i64 [held] the met experts, from 0 on for the first held
    STARTS = auto()  # i64 [held] where each met expert's rows begin
    TALLY = auto()  # i64 [held] for the one who counts


class SendField(OperandUser):
    """Rows laid out expert by expert."""

    INPUT = auto()  # f32 [rows, width]
    WIDTH = auto()
    PER_TOKEN = auto()
    PLACES = auto()
    ROWS = auto()


class RecordsField(Field):
    """Argument records of the met experts' products: those of the layer, moved to where an expert's rows lie."""

    PLAN = auto()
    MET = auto()
    STARTS = auto()
    NUM_FIELDS = auto()
    ROWS_FIELD = auto()  # which of them says where the number of rows is
    STRIDES = auto()  # i64 [fields] bytes from row to row
    OF_LAYER = auto()  # i64 [held, fields]
    FUNCTIONS = auto()  # i64 [held]
    RECORDS = auto()  # i64 [held, fields] what is written
    CALLS = auto()  # i64 [held, 2] a function and its record


class CallsField(Field):
    """Other operations, one after the other, over rows that the plan counts."""

    CALLS = auto()  # i64 [count, 2]
    PLAN = auto()
    COUNT = auto()  # the place in the plan of how many


class SumField(Field):
    """What experts found, by each row's shares."""

    INPUT = auto()  # f32 [rows of experts, stride]
    STRIDE = auto()
    WIDTH = auto()
    PER_TOKEN = auto()
    PLACES = auto()
    SHARES = auto()
    ROWS = auto()
    TARGET = auto()  # f32 [rows, width]
    ACCUMULATE = auto()  # 1: add to what the target holds


ELSEWHERE = -1
"""The place of a row that is sent to another rank's expert."""
