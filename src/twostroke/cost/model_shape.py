"""A model as the cost of running it sees it: plain numbers, the same whatever the file format or backend."""

from __future__ import annotations

from dataclasses import dataclass, replace

from twostroke.core.kv_layout import KVContent


@dataclass(frozen=True, slots=True)
class LatentWork:
    """Of multi-head latent attention (DeepSeek): a position is kept as one latent vector that all heads share. A query
    may meet keys and values expanded from it, or be brought into the latent space itself. Multiply-adds of both ways,
    in all layers and heads. What a token's own projections take is counted with the layer's matrices."""

    expanded_per_pair: int
    """Of a query-key pair, keys and values expanded."""
    absorbed_per_pair: int
    """Of a query-key pair in the latent space."""
    expansion_per_position: int
    """To expand one position that was kept."""
    absorbs_context: bool = False
    """Whether a chunk's queries meet what lies before it in the latent space, whichever way takes fewer: they meet
    their own chunk expanded. Else a chunk expands all that it reads."""

    def of_chunk(self, start: int, num_tokens: int, pairs: int) -> int:
        """`pairs`: of a query and a key, all there are. A chunk's own positions are expanded with the layer's matrices;
        one that absorbs brings queries to latents, and back what they found, which takes as much again."""
        if not self.absorbs_context or not start:
            return self.expanded_per_pair * pairs + self.expansion_per_position * start
        before = start * num_tokens
        found = self.expanded_per_pair * (pairs - before) + self.absorbed_per_pair * before
        return found + self.expansion_per_position * num_tokens


@dataclass(frozen=True, slots=True)
class KVGroupShape:
    """Layers that attend alike."""

    num_layers: int
    window: int | None
    """A query reads this many positions at most, itself among them; None: all up to itself."""
    bytes_per_token: int
    """K and V of one position, over all the group's layers; of states, all of them."""
    content: KVContent = "keys and values"
    pair_multiply_adds: int | None = None
    """Of a query-key pair, scores and weighted values in all of the group's layers; of a state, of one token. None: by
    the model's heads."""
    latent: LatentWork | None = None
    num_sharing: int = 0
    """Further layers that read the KV of these, and keep none: they read it over again."""

    @property
    def num_readers(self) -> int:
        return self.num_layers + self.num_sharing

    @property
    def read_bytes_per_token(self) -> int:
        """Of one position, over all layers that read it."""
        return self.bytes_per_token * self.num_readers // max(1, self.num_layers)

    @property
    def moved_per_position(self) -> int:
        """Bytes that a step moves for each position that it reads: a state is written back whole, too."""
        return 2 * self.bytes_per_token if self.content == "state" else self.read_bytes_per_token

    def moved_before(self, start: int) -> int:
        """Bytes that a chunk moves of what lies before its first position, once for all its queries."""
        if self.content == "state":
            return self.moved_per_position if start else self.bytes_per_token
        return (start if self.window is None else min(start, self.window - 1)) * self.read_bytes_per_token

    def positions_read(self, context_len: int) -> int:
        """How many positions the last query of a context reads, itself among them."""
        return context_len if self.window is None else min(context_len, self.window)

    def query_key_pairs(self, start: int, num_tokens: int) -> int:
        """The causal pairs, in one layer, of the queries at positions start to start + num_tokens - 1."""
        end = start + num_tokens
        if self.window is None:
            return _triangle(end) - _triangle(start)
        full_from = max(start, min(end, self.window))  # from here on every query reads a whole window
        return _triangle(full_from) - _triangle(start) + (end - full_from) * self.window

    def multiply_adds(self, start: int, num_tokens: int, head_width: int) -> int:
        """Of a causal range, at least. Latent attention goes whichever of its two ways takes fewer."""
        pairs = self.query_key_pairs(start, num_tokens)
        if self.latent is not None:
            expanded = self.latent.expanded_per_pair * pairs + self.latent.expansion_per_position * start
            return min(expanded, self.latent.absorbed_per_pair * pairs)
        return self.multiply_adds_per_pair(head_width) * pairs

    def expected_multiply_adds(self, start: int, num_tokens: int, head_width: int, *, is_chunk: bool) -> int:
        """What is really done, no less than `multiply_adds`, which is a bound: of a chunk, or of a slot's tokens, which
        meet latents as they are kept."""
        if self.latent is None:
            return self.multiply_adds(start, num_tokens, head_width)
        pairs = self.query_key_pairs(start, num_tokens)
        return self.latent.of_chunk(start, num_tokens, pairs) if is_chunk else self.latent.absorbed_per_pair * pairs

    def multiply_adds_per_pair(self, head_width: int) -> int:
        """Of a query and a key, where attention is not latent."""
        return 2 * head_width * self.num_readers if self.pair_multiply_adds is None else self.pair_multiply_adds


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """The experts of all layers together; their router is counted with the rest of the layer."""

    num_experts: int
    experts_per_token: int
    weight_bytes: int
    matmul_parameters: int
    """Of their matrices, all experts together."""
    num_parts: int = 1
    """Groups of devices that each hold so large a part of all experts: what is counted here is one part's."""
    busy_groups: int = 1
    """Of them, those that send tokens at the same time, each as many."""

    @property
    def active_parameters(self) -> int:
        """Those that one token meets."""
        return self.matmul_parameters // self.num_experts * self.experts_per_token

    def weight_bytes_read(self, num_tokens: int) -> float:
        """What a step of `num_tokens` tokens reads, if they choose without regard to each other: an expert is left
        alone by one token with a probability of 1 - k / E, and by all of them with that to the power of their number. A
        part is taken to have its even share of them, but whole experts: the busiest group reads one at least."""
        untouched = (1 - self.experts_per_token / self.num_experts) ** (num_tokens * self.busy_groups)
        read = self.weight_bytes * (1 - untouched)
        return read if self.num_parts == 1 else max(read, self.weight_bytes * self.num_parts / self.num_experts)


@dataclass(frozen=True, slots=True)
class WeightCopies:
    """Matrices of which there is a second copy in fewer bits, and how many tokens a step that reads it has at most."""

    num_bytes: int
    """Of the copies."""
    replaced_bytes: int
    """Of the matrices themselves."""
    max_tokens: int
    plain_tokens: int = 0
    """A step of up to this many tokens reads the layers' matrices all the same, by kernels that have no copies. No
    bound counts with that: it need not be so."""
    head_bytes: int = 0
    """Of the copies, the head's, which such a step reads, too."""
    head_replaced_bytes: int = 0

    def saved_bytes(self, num_tokens: int) -> int:
        """What a step of `num_tokens` tokens need not read."""
        return max(0, self.replaced_bytes - self.num_bytes) if num_tokens <= self.max_tokens else 0

    def expected_reads(self, num_tokens: int) -> tuple[int, int]:
        """What a step really reads of copies, and of the matrices themselves."""
        if num_tokens <= self.plain_tokens:
            return self.head_bytes, self.replaced_bytes - self.head_replaced_bytes
        return (self.num_bytes, 0) if num_tokens <= self.max_tokens else (0, self.replaced_bytes)


@dataclass(frozen=True, slots=True)
class DecodeWeights:
    """Copies of weights that steps of few tokens, as decode has them, read in place of the weights themselves. Both are
    held: long prompts go on reading the weights."""

    dense: WeightCopies | None
    """Of matrices that every token meets."""
    experts: WeightCopies | None
    """Of all experts' matrices."""

    @property
    def num_bytes(self) -> int:
        """What they take beside the weights."""
        return sum(copies.num_bytes for copies in (self.dense, self.experts) if copies is not None)


@dataclass(frozen=True, slots=True)
class ModelShape:
    num_parameters: int
    """All of them, whether a token meets them or not."""
    layer_matmul_parameters: int
    """Parameters of the layers' matrix products that a token meets, once each: of experts, only those it is sent to."""
    head_matmul_parameters: int
    """The output head's, tied or not: each meets only the tokens whose logits are wanted."""
    weight_bytes_per_step: int
    """Bytes of weights that a step reads whatever its batch: all but an untied embedding table, of which a step gathers
    a row a token, and experts, which `experts` counts. A tied table is read in full, as the head."""
    num_heads: int
    head_dim: int
    """Of most layers: a group may have its own work."""
    kv_groups: tuple[KVGroupShape, ...]
    experts: ExpertsShape | None = None
    embedding_bytes: int = 0
    """Of an embedding table that is not the head too: held in memory, never read in full."""
    decode_weights: DecodeWeights | None = None
    """None: both phases read the same weights."""

    @property
    def active_parameters(self) -> int:
        """What one token is multiplied by, the head among it."""
        return self.layer_matmul_parameters + self.head_matmul_parameters

    @property
    def weight_bytes(self) -> int:
        """All that lies in memory."""
        copies = self.decode_weights.num_bytes if self.decode_weights else 0
        experts = self.experts.weight_bytes if self.experts else 0
        return self.weight_bytes_per_step + self.embedding_bytes + experts + copies

    def weight_bytes_read(self, num_tokens: int) -> float:
        """Bytes of weights that a step of `num_tokens` tokens reads, each once; of experts, what is to be expected. A
        step of few tokens, be they decodes or a short prompt's, reads what there is for decode."""
        dense = self.dense_bytes_read(num_tokens)
        return dense + self.expert_bytes_read(num_tokens)

    def dense_bytes_read(self, num_tokens: int) -> int:
        """Of all but experts."""
        copies = self.decode_weights.dense if self.decode_weights else None
        return self.weight_bytes_per_step - (copies.saved_bytes(num_tokens) if copies else 0)

    def expert_bytes_read(self, num_tokens: int) -> float:
        if self.experts is None:
            return 0
        read = self.experts.weight_bytes_read(num_tokens)
        copies = self.decode_weights.experts if self.decode_weights else None
        return read * (1 - copies.saved_bytes(num_tokens) / self.experts.weight_bytes) if copies else read

    def expected_bytes_read(self, num_tokens: int) -> float:
        """What a step really reads of all weights: no less than `weight_bytes_read`, which is a bound."""
        return sum(self.expected_dense_reads(num_tokens)) + self.expert_bytes_read(num_tokens)

    def expected_dense_reads(self, num_tokens: int) -> tuple[int, int]:
        """Of all but experts, what a step really reads of copies, and of the weights themselves: together no less than
        `dense_bytes_read`, which is a bound."""
        copies = self.decode_weights.dense if self.decode_weights else None
        if copies is None:
            return 0, self.weight_bytes_per_step
        copied, plain = copies.expected_reads(num_tokens)
        return copied, self.weight_bytes_per_step - copies.replaced_bytes + plain

    @property
    def kv_bytes_per_token(self) -> int:
        """What one more token of context takes while no window is full."""
        return sum(group.bytes_per_token for group in self.kv_groups if group.content != "state")

    def kv_bytes_read(self, context_len: int) -> int:
        """Bytes of K and V that the last query of a context reads, its own position among them, and of states."""
        return sum(group.positions_read(context_len) * group.read_bytes_per_token for group in self.kv_groups)

    def kv_bytes_moved(self, context_len: int) -> int:
        """What the last query of a context reads and, of states, writes."""
        return sum(group.positions_read(context_len) * group.moved_per_position for group in self.kv_groups)

    def attention_multiply_adds(self, start: int, num_tokens: int) -> int:
        """Scores and weighted values of a causal range: head_dim multiply-adds each, a head, a query-key pair."""
        head_width = self.num_heads * self.head_dim
        return sum(group.multiply_adds(start, num_tokens, head_width) for group in self.kv_groups)

    def expected_attention_multiply_adds(self, start: int, num_tokens: int, *, is_chunk: bool) -> int:
        """What a step really takes for it: no less than `attention_multiply_adds`, which is a bound. Else the range is
        of a slot's drafts."""
        head_width = self.num_heads * self.head_dim
        groups = self.kv_groups
        return sum(group.expected_multiply_adds(start, num_tokens, head_width, is_chunk=is_chunk) for group in groups)

    def with_contexts_absorbed(self) -> ModelShape:
        """As a backend computes it whose chunks meet latents before them as they are kept."""
        groups = (
            group if group.latent is None else replace(group, latent=replace(group.latent, absorbs_context=True))
            for group in self.kv_groups
        )
        return replace(self, kv_groups=tuple(groups))


def _triangle(count: int) -> int:
    """1 + 2 + ... + count."""
    return count * (count + 1) // 2
