"""Suffix lookup: what followed the last tokens of a stream wherever they stood before, in the stream itself and in
recent requests of the same tenant and salt; never in others'. Knows how likely each guess is: by how often it followed,
and by what came of guesses behind contexts as long. Keeps a bounded number of tokens; whoever holds most gives up the
oldest requests, so that nobody pushes out what others said."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from twostroke.core.request import Request
from twostroke.speculation.drafter import NOTHING, Ask, Proposal
from twostroke.speculation.text_window import LONGEST, Text, Window

MAX_TOKENS = 1 << 16
"""That are kept in all, about 0.6 kB each."""
MAX_SHARES = 32
"""Tenants and salts whose ended requests are kept where room is short; of more, those that were there longest ago give
theirs up first, however little it is."""
FILED_A_TURN = 512
"""A long prompt is taken in pieces, so that no step waits for it."""
FORGOTTEN_AT_ONCE = 64
LEAST_CHANCE = 0.05
"""Of a guess to hold with all before it: the walk ends where it would be less."""
FIRST_TRUST = {2: 0.35, 4: 0.6, 8: 0.85, 16: 0.93, 32: 0.97}
"""The chance that what followed a context of this many tokens once follows it again, before anything was learnt."""
TRUST_WEIGHT = 8.0
"""Guesses' worth of experience that this counts for."""
TRUST_FADES = 0.99


class Trust:
    """How often what followed a context once follows it again, by the context's length."""

    def __init__(self) -> None:
        known = [max(length for length in FIRST_TRUST if length <= max(2, place)) for place in range(LONGEST + 1)]
        self._tried = [TRUST_WEIGHT] * len(known)
        self._held = [TRUST_WEIGHT * FIRST_TRUST[length] for length in known]

    def after(self, length: int) -> float:
        length = min(length, LONGEST)
        return self._held[length] / self._tried[length]

    def learn(self, length: int, held: bool) -> None:
        length = min(length, LONGEST)
        self._tried[length] = self._tried[length] * TRUST_FADES + 1.0
        self._held[length] = self._held[length] * TRUST_FADES + held


class Share(Window):
    """The texts of one tenant and salt, and what is kept of them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_tokens = 0
        self.ended: OrderedDict[int, Text] = OrderedDict()
        """Texts of requests that ended, by number, the one that goes first at the beginning."""


class SuffixDrafter:
    name = "suffix"
    covers: tuple[str, ...] = ("ngram",)
    """It looks wherever that one does: asking both takes time and finds nothing more."""

    def __init__(self, max_tokens: int = MAX_TOKENS, *, shares: bool = True) -> None:
        """`shares`: requests of a tenant and salt learn from each other; else each from itself alone."""
        self._max_tokens = max_tokens
        self._shares = shares
        self._shares_of: dict[Hashable, Share] = {}
        """Of all who may learn from each other."""
        self._resting: OrderedDict[Hashable, Share] = OrderedDict()
        """Those of them that hold texts which ended, the one that was there longest ago first."""
        self._streams: dict[int, Text] = {}
        self._keys: dict[int, Hashable] = {}
        """Of each stream, who it may learn from."""
        self._closed: dict[int, tuple[Hashable, Text]] = {}
        """Texts of requests that ended, by number."""
        self._waiting: dict[int, Text] = {}
        """By number, texts that are not filed yet, since nobody asks for their streams any more."""
        self._guesses: dict[int, tuple[int, tuple[int, ...]]] = {}
        """Of each stream, the length of context that its last guess was behind, and the guess."""
        self._next_number = 0
        self._trust = Trust()
        self.num_tokens = 0
        """That are kept."""

    def _key(self, seq_id: int, request: Request) -> Hashable:
        """Those with the same may learn from each other."""
        return (request.tenant, request.cache_salt) if self._shares else seq_id

    def open(self, seq_id: int, request: Request, token_ids: Sequence[int]) -> None:
        key = self._keys[seq_id] = self._key(seq_id, request)
        share = self._shares_of.setdefault(key, Share())
        text = self._streams[seq_id] = share.open(self._next_number, token_ids)
        self._next_number += 1
        self._count(text)
        if key in self._resting:
            self._resting.move_to_end(key)
        while (donor := text.donor) is not None and donor in share.ended:  # they are in use
            share.ended.move_to_end(donor)
            text = share.ended[donor]

    def _count(self, text: Text) -> None:
        size = text.size
        self.num_tokens += size - text.counted
        share_of(text).num_tokens += size - text.counted
        text.counted = size

    def extend(self, seq_id: int, token_ids: Sequence[int]) -> None:
        self._learn(self._guesses.pop(seq_id, None), token_ids)
        self._streams[seq_id].tokens += token_ids  # they are filed when somebody asks

    def _learn(self, guess: tuple[int, tuple[int, ...]] | None, token_ids: Sequence[int]) -> None:
        """Whether guesses held is seen in the tokens that came, whether or not the guesses were computed."""
        if guess is None:
            return
        length, guessed = guess
        for place, (token_id, expected) in enumerate(zip(token_ids, guessed, strict=False)):
            self._trust.learn(length + place, token_id == expected)
            if token_id != expected:
                return

    def close(self, seq_id: int) -> None:
        text = self._streams.pop(seq_id, None)
        if text is None:
            return
        self._guesses.pop(seq_id, None)
        key = self._keys.pop(seq_id)
        text.close()
        self._count(text)
        self._closed[text.number] = key, text
        share = self._shares_of[key]
        share.ended[text.number] = text
        self._resting[key] = share
        self._resting.move_to_end(key)
        if not self._shares:
            self._drop(text.number)
        elif text.num_waiting > 0:
            self._waiting[text.number] = text
        elif text.num_filed == text.num_forgotten:
            self._drop(text.number)  # it holds nothing that others do not
        self._make_room()

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        self._file([self._streams[seq_id] for seq_id, _ in asks])
        self._make_room()
        return [self._proposal(seq_id, most) for seq_id, most in asks]

    def _file(self, asked: list[Text]) -> None:
        left = FILED_A_TURN
        for text in asked:
            if text.num_waiting > 0 and left > 0:
                left -= text.window.file(text, left)
                self._count(text)
        while self._waiting and left > 0:
            text = next(iter(self._waiting.values()))
            left -= text.window.file(text, left)
            if text.num_waiting <= 0:
                del self._waiting[text.number]

    def _proposal(self, seq_id: int, most: int) -> Proposal:
        text = self._streams[seq_id]
        length, sightings = text.window.sightings(text)
        if not sightings:
            self._guesses.pop(seq_id, None)
            return NOTHING
        paths = [seen.followed(place, most, repeats=seen is text) for seen, place in sightings]
        found = self._walk(length, paths)
        self._guesses[seq_id] = length, found.token_ids
        return found

    def _walk(self, length: int, paths: list[list[int]]) -> Proposal:
        """Along the path that was taken most often, while it is likely; of those taken as often, the latest."""
        token_ids: list[int] = []
        chances: list[float] = []
        survival, place = 1.0, 0
        while tokens := [path[place] for path in paths if place < len(path)]:
            best, total = tokens[0], len(tokens)
            count = tokens.count(best)
            if count < total:
                # The latest stand first, and of several that are equal `max` takes the first.
                best = max(tokens, key=tokens.count)
                count = tokens.count(best)
                paths = [path for path in paths if place < len(path) and path[place] == best]
            # One sighting is worth what is trusted, each further one a whole one.
            chance = (count - 1 + self._trust.after(length + place)) / total
            survival *= chance
            if survival < LEAST_CHANCE:
                break
            token_ids.append(best)
            chances.append(chance)
            place += 1
        return Proposal(tuple(token_ids), tuple(chances))

    def forget(self) -> None:
        """Drop the texts of all requests that ended."""
        for number, (_, text) in list(self._closed.items()):
            text.window.forget(text, text.num_filed)
            self._drop(number)

    def _make_room(self) -> None:
        """Forget what is too much, in pieces, so that no step waits."""
        left = 2 * FILED_A_TURN
        while self.num_tokens > self._max_tokens and left > 0:
            text = self._next_to_go()
            count = text.window.forget(text, min(left, max(self.num_tokens - self._max_tokens, FORGOTTEN_AT_ONCE)))
            left -= count + 1
            self._count(text)
            if text.is_closed and text.num_forgotten == text.num_filed:
                self._drop(text.number)
            elif not count:
                return

    def _next_to_go(self) -> Text:
        """Of whoever holds most, the oldest text that ended; the longest stream where nothing ended, or where its owner
        holds more than all others together and has nothing else."""
        longest = max(self._streams.values(), key=lambda stream: stream.counted, default=None)
        if longest is not None:
            owner = share_of(longest)
            if not self._resting or (not owner.ended and 2 * owner.num_tokens > self._max_tokens):
                return longest
        resting = self._resting.values()
        share = next(iter(resting)) if len(resting) > MAX_SHARES else max(resting, key=lambda one: one.num_tokens)
        return next(iter(share.ended.values()))

    def _drop(self, number: int) -> None:
        key, text = self._closed.pop(number)
        self._waiting.pop(number, None)
        share = self._shares_of[key]
        self.num_tokens -= text.counted
        share.num_tokens -= text.counted
        share.drop(text)
        del share.ended[number]
        if not share.ended:
            del self._resting[key]
        if not share.texts:
            del self._shares_of[key]


def share_of(text: Text) -> Share:
    assert isinstance(text.window, Share)
    return text.window
