"""One text, or two, as a model that gives vectors reads them: within what its tokenizer puts around them, and cut at
their end where they are too long."""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.text.tokenizer import Tokenizer


def framed(tokenizer: Tokenizer, ids: Sequence[int], limit: int | None = None) -> tuple[int, ...]:
    """A text's own tokens within their frame, `limit` in all at most; None: however many they are."""
    prefix, suffix = tokenizer.prefix_ids, tokenizer.suffix_ids
    room = len(ids) if limit is None else max(0, limit - len(prefix) - len(suffix))
    return (*prefix, *ids[:room], *suffix)


def framed_pair(
    tokenizer: Tokenizer, first: Sequence[int], second: Sequence[int], limit: int | None = None
) -> tuple[tuple[int, ...], int]:
    """Two texts together, and the token that the second begins at. Of too many it is the second that is cut."""
    before, between, behind = tokenizer.pair_frame
    start = len(before) + len(first) + len(between)
    room = len(second) if limit is None else max(0, limit - start - len(behind))
    return (*before, *first, *between, *second[:room], *behind), start


def framed_texts(
    head: Sequence[int],
    num_opening: int,
    texts: Sequence[int],
    tail: Sequence[int],
    limit: int | None = None,
    most: int | None = None,
) -> tuple[int, ...]:
    """A query and a document that were tokenized as one text, between what a language model reads around them. The
    document is what lies behind `num_opening` tokens. `most`: of its tokens."""
    room = len(texts) if most is None else num_opening + most
    if limit is not None:
        room = min(room, max(0, limit - len(head) - len(tail)))
    return (*head, *texts[:room], *tail)
