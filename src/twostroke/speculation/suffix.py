"""Suffix lookup guesses what followed the last tokens of a stream wherever they stood before: in the stream itself and
in recent requests of the same tenant and salt, never in others'. It knows how likely each guess is, by how often it
followed, and by how guesses behind contexts of that length turned out. Keeps a bounded number of tokens. The tenant and
salt that hold most give up their oldest requests first, so that nobody pushes out another's texts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from twostroke.core.request import Request
from twostroke.speculation.drafter import NOTHING, Ask, Proposal
from twostroke.speculation.text_window import LONGEST, Text, Window

MAX_TOKENS = 1 << 16
"""How many tokens are kept in all, about 0.6 kB each."""
MAX_SHARES = 32
"""The most tenants and salts that keep ended requests while room is short. If there are more, those that were there
longest ago give theirs up first, however little it is."""
FILED_A_TURN = 512
"""How many tokens are filed in one turn. A long prompt is taken in pieces, so that no step waits for it."""
FORGOTTEN_AT_ONCE = 64
LEAST_CHANCE = 0.05
"""The least chance of a guess to hold with all before it. The walk ends where it would be less."""
FIRST_TRUST = {2: 0.35, 4: 0.6, 8: 0.85, 16: 0.93, 32: 0.97}
"""For each length of context, the assumed chance that what followed it once follows it again, before anything was
learnt."""
TRUST_WEIGHT = 8.0
"""The assumed chance counts for this many guesses."""
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
    """The texts of one tenant and salt, those of ended requests among them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_tokens = 0
        self.ended: OrderedDict[int, Text] = OrderedDict()
        """Texts of requests that ended, by number. The first is given up first."""


class SuffixDrafter:
    name = "suffix"
    covers: tuple[str, ...] = ("ngram",)
    """The names of drafters that look nowhere else than this one. Asking both takes time and finds nothing more."""

    def __init__(self, max_tokens: int = MAX_TOKENS, *, shares: bool = True) -> None:
        """`shares` means that requests of a tenant and salt learn from each other. Otherwise each learns from itself
        alone."""
        self._max_tokens = max_tokens
        self._shares = shares
        self._shares_of: dict[Hashable, Share] = {}
        """The texts of all requests that may learn from each other, by their common key."""
        self._resting: OrderedDict[Hashable, Share] = OrderedDict()
        """The shares that hold texts of ended requests, the one that was used longest ago first."""
        self._streams: dict[int, Text] = {}
        self._keys: dict[int, Hashable] = {}
        """The key of each stream."""
        self._closed: dict[int, tuple[Hashable, Text]] = {}
        """Texts of requests that ended, by number, with their keys."""
        self._waiting: dict[int, Text] = {}
        """Texts, by number, that are not fully filed yet, since nobody asks for their streams any more."""
        self._guesses: dict[int, tuple[int, tuple[int, ...]]] = {}
        """For each stream, its last guess, and the length of the context behind which it was made."""
        self._next_number = 0
        self._trust = Trust()
        self.num_tokens = 0
        """How many tokens are kept."""

    def _key(self, seq_id: int, request: Request) -> Hashable:
        """Returns a stream's key. Streams with the same key may learn from each other."""
        return (request.tenant, request.cache_salt) if self._shares else seq_id

    def open(self, seq_id: int, request: Request, token_ids: Sequence[int]) -> None:
        key = self._keys[seq_id] = self._key(seq_id, request)
        share = self._shares_of.setdefault(key, Share())
        text = self._streams[seq_id] = share.open(self._next_number, token_ids)
        self._next_number += 1
        self._count(text)
        if key in self._resting:
            self._resting.move_to_end(key)
        while (donor := text.donor) is not None and donor in share.ended:  # these texts are in use
            share.ended.move_to_end(donor)
            text = share.ended[donor]

    def _count(self, text: Text) -> None:
        size = text.size
        self.num_tokens += size - text.counted
        share_of(text).num_tokens += size - text.counted
        text.counted = size

    def extend(self, seq_id: int, token_ids: Sequence[int]) -> None:
        self._learn(self._guesses.pop(seq_id, None), token_ids)
        self._streams[seq_id].tokens += token_ids  # tokens are filed when somebody asks

    def _learn(self, guess: tuple[int, tuple[int, ...]] | None, token_ids: Sequence[int]) -> None:
        """Learns from the tokens that came whether guesses held, whether or not the guesses were computed."""
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
        """Returns the tokens of the path that was taken most often, as far as they are likely. Of paths taken equally
        often it is the latest."""
        token_ids: list[int] = []
        chances: list[float] = []
        survival, place = 1.0, 0
        while tokens := [path[place] for path in paths if place < len(path)]:
            best, total = tokens[0], len(tokens)
            count = tokens.count(best)
            if count < total:
                # The latest paths stand first, and of equal counts `max` takes the first.
                best = max(tokens, key=tokens.count)
                count = tokens.count(best)
                paths = [path for path in paths if place < len(path) and path[place] == best]
            # The first sighting counts for the learnt chance, each further one for 1.
            chance = (count - 1 + self._trust.after(length + place)) / total
            survival *= chance
            if survival < LEAST_CHANCE:
                break
            token_ids.append(best)
            chances.append(chance)
            place += 1
        return Proposal(tuple(token_ids), tuple(chances))

    def forget(self) -> None:
        """Drops the texts of all requests that ended."""
        for number, (_, text) in list(self._closed.items()):
            text.window.forget(text, text.num_filed)
            self._drop(number)

    def _make_room(self) -> None:
        """Forgets what is too much, in pieces, so that no step waits."""
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
        """Returns the text to give up next. It is the oldest ended text of the share that holds most. It is the longest
        stream if nothing ended, or if that stream's owner has nothing else and holds more than all others together."""
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
