"""An EAGLE-3 head on the device against the same in numpy: chunks, streams side by side, prefixes that others read, and
chains of drafts that are cut short for some rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.backends.cuda.tables import fused_up_to
from tests.models.heads.published import HIDDEN_SIZE, NUM_TAPS, VOCAB_SIZE, PublishedHead
from tests.models.heads.test_head_files import target

from twostroke.backends.cuda.eagle3 import Eagle3Drafter
from twostroke.backends.cuda.eagle3_weights import Eagle3Buffers, Eagle3Weights
from twostroke.backends.cuda.graphs import GraphCache
from twostroke.backends.cuda.kernels.product import Product
from twostroke.backends.cuda.kernels.sampling_state import NUM_OUTPUT, PROMPT_LEN
from twostroke.backends.cuda.matrix import Matrix, Plain
from twostroke.backends.cuda.passes import Decodes, Pass, TokenArrays
from twostroke.backends.cuda.rows import DeviceRows
from twostroke.backends.cuda.sampling import SamplingRows
from twostroke.backends.cuda.weights import Weights
from twostroke.backends.host.eagle3 import Eagle3Network
from twostroke.backends.reference import FACTORY as REFERENCE
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.engine.companions import plan_head
from twostroke.models.heads.eagle3 import Eagle3Head, load_eagle3

# NaN is meant where it occurs; a device says nothing of it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

BLOCK_SIZE, NUM_BLOCKS, MAX_ROWS, MAX_CONTEXT, MAX_DRAFTS = 16, 24, 4, 96, 4
VARIANTS = [
    ("llama", {}),
    ("llama", {"norm_before_residual": True, "norm_output": True}),
    ("llama", {"norm_before_fc": True}),
    ("qwen3", {"fc_norm": True}),
]


@dataclass
class Pair:
    """The head twice, with the same blocks for each row."""

    head: Eagle3Head
    network: Eagle3Network
    drafter: Eagle3Drafter
    rows: DeviceRows
    drafts: torch.Tensor
    tables: np.ndarray  # [rows, blocks]
    device: str

    def follow(self, pieces: list[tuple[int, int, np.ndarray, np.ndarray]]) -> None:
        """Row, first position, tokens and taps of each piece of a pass, on the device alone."""
        ids = np.concatenate([tokens for _, _, tokens, _ in pieces])
        rows = np.concatenate([np.full(len(tokens), row) for row, _, tokens, _ in pieces])
        positions = np.concatenate([start + np.arange(len(tokens)) for _, start, tokens, _ in pieces])
        taps = torch.from_numpy(np.concatenate([taps for *_, taps in pieces])).to(self.device)
        arrays = (torch.from_numpy(array.astype(np.int32)).to(self.device) for array in (ids, rows, positions))
        tokens = TokenArrays(*arrays)
        self.drafter.follow(Pass(tokens, Decodes(len(tokens)), None), taps)

    def settle(self, row: int, tokens: np.ndarray) -> None:
        """The row knows all of these."""
        record = self.rows.sampling.records[row]
        record[PROMPT_LEN.value], record[NUM_OUTPUT.value] = len(tokens) - 1, 1
        self.rows.last_tokens[row] = int(tokens[-1])

    def draft(self, counts: dict[int, int]) -> dict[int, list[int]]:
        """As many drafts as are asked for each row."""
        width = 1 + max(counts.values())
        entered = np.full((len(counts), width), MAX_ROWS, np.int32)
        for place, (row, count) in enumerate(counts.items()):
            entered[place, : 1 + count] = row
        self.drafts.fill_(-7)
        self.drafter.draft(torch.from_numpy(entered.reshape(-1)).to(self.device), width, self.drafts)
        return {row: self.drafts[row, :count].tolist() for row, count in counts.items()}

    def expected(self, row: int, tokens: np.ndarray, taps: np.ndarray, count: int) -> list[int]:
        """From the whole text, in numpy: all tokens are known, and the last was not read by the model."""
        joined, known = self.network.join(taps[: len(tokens) - 1]), len(tokens) - 1
        tables = np.repeat(self.tables[row : row + 1], known, axis=0)
        if known > 1:
            self.network.write(tokens[1:known], joined[: known - 1], np.arange(1, known, dtype=np.int32), tables[1:])
        state, token, found = joined[-1:], tokens[-1:], []
        for step in range(count):
            position = np.array([known + step], np.int32)
            state, scores = self.network.step(token, state, position, tables[:1], np.ones(1, np.int32))
            token = self.head.target_ids[scores.argmax(axis=1)].astype(np.int32)
            found.append(int(token[0]))
        return found


def make_pair(folder: Path, device: str, few_rows: int, kind: str = "llama", embedding: bool = False, **flags) -> Pair:
    torch.manual_seed(3)
    rng = np.random.default_rng(4)
    head = load_eagle3(PublishedHead(kind, embedding=embedding, **flags).save(folder / "head"), target())
    table = rng.standard_normal((VOCAB_SIZE, HIDDEN_SIZE)).astype(np.float32)
    network = Eagle3Network(
        head,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_context=MAX_CONTEXT,
        embed=table.__getitem__,
        output=lambda: np.zeros(0, np.float32),
    )
    place = torch.device(device)
    layout = KVLayout(BLOCK_SIZE, (KVGroup((0,), None, 9), KVGroup((0,), None, NUM_BLOCKS, model=1)))
    sampling = SamplingRows(MAX_ROWS, VOCAB_SIZE, device)
    rows = DeviceRows(layout, MAX_ROWS, MAX_CONTEXT, sampling, place)
    tables = rng.permutation(NUM_BLOCKS).astype(np.int32).reshape(MAX_ROWS, -1)
    rows.tables[1, :MAX_ROWS] = torch.from_numpy(tables).to(device)
    shared = torch.from_numpy(table).to(device)
    whole = Weights(shared, (), shared[0], Matrix("head", Product("head", *shared.shape), {"plain": Plain(shared)}))
    companion = plan_head(head, 1, REFERENCE).companion
    weights, loader = Eagle3Weights.placed(companion, whole, place, torch.float32, None)
    choices = fused_up_to(few_rows, device, torch.float32)
    assert choices is not None
    buffers = Eagle3Buffers(
        head.spec, num_tokens=64, num_rows=MAX_ROWS, num_drafts=MAX_DRAFTS, device=place, dtype=torch.float32
    )
    drafter = Eagle3Drafter(
        head,
        weights,
        loader,
        buffers,
        rows,
        layout,
        1,
        max_context=MAX_CONTEXT,
        num_sms=4,
        choices=choices,
        graphs=GraphCache(place),
    )
    assert drafter.load() == ()
    drafts = torch.zeros(MAX_ROWS + 1, 7, dtype=torch.int32, device=place)
    return Pair(head, network, drafter, rows, drafts, tables, device)


def text(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB_SIZE, count).astype(np.int32)
    return tokens, rng.standard_normal((count, NUM_TAPS * HIDDEN_SIZE)).astype(np.float32)


@pytest.mark.parametrize(("kind", "flags"), VARIANTS)
def test_a_prompt_in_chunks_and_a_chain(tmp_path: Path, device: str, kind: str, flags: dict[str, bool]) -> None:
    """The slots of each chunk need the last state of the one before."""
    pair = make_pair(tmp_path, device, 0, kind, embedding=bool(flags), **flags)
    tokens, taps = text(1, 39)
    for start, end in ((0, 16), (16, 29), (29, 38)):
        pair.follow([(2, start, tokens[start:end], taps[start:end])])
    pair.settle(2, tokens)
    assert pair.draft({2: 4})[2] == pair.expected(2, tokens, taps, 4)


def test_fused_products_guess_the_same(tmp_path: Path, device: str) -> None:
    pair = make_pair(tmp_path, device, 2, norm_output=True)
    tokens, taps = text(1, 5)
    for start, end in ((0, 2), (2, 4)):
        pair.follow([(0, start, tokens[start:end], taps[start:end])])
    pair.settle(0, tokens)
    assert pair.draft({0: 2})[0] == pair.expected(0, tokens, taps, 2)


def test_streams_side_by_side_ask_for_different_numbers(tmp_path: Path, device: str) -> None:
    """What a row is not to have is not written to it, and goes to the padding row's block."""
    pair = make_pair(tmp_path, device, 0)
    texts = {0: text(1, 18), 3: text(2, 34), 1: text(3, 2)}
    pair.follow([(row, 0, tokens[:-1], taps[:-1]) for row, (tokens, taps) in texts.items()])
    for row, (tokens, _) in texts.items():
        pair.settle(row, tokens)
    counts = {0: 4, 3: 1, 1: 3}
    before = pair.drafter._paged.keys.clone()
    found = pair.draft(counts)
    assert found == {row: pair.expected(row, *texts[row], count) for row, count in counts.items()}
    assert (pair.drafts[3, 1:] == -7).all() and (pair.drafts[1, 3:] == -7).all()
    changed = (pair.drafter._paged.keys != before).flatten(1).any(1).nonzero().flatten().tolist()
    granted = {pair.tables[row, (len(texts[row][0]) - 1 + step) // 16] for row in counts for step in range(counts[row])}
    assert set(changed) - {NUM_BLOCKS} == granted


@pytest.mark.parametrize("num_held", range(4))
def test_drafts_that_did_not_hold_leave_nothing_behind(tmp_path: Path, device: str, num_held: int) -> None:
    """Three drafts are read along, of which some hold; then the next are made, from what came in their place."""
    pair = make_pair(tmp_path, device, 0)
    tokens, taps = text(1, 40)
    pair.follow([(1, 0, tokens[:14], taps[:14])])
    pair.settle(1, tokens[:15])
    pair.draft({1: 3})
    drafted, seen = tokens[14:18].copy(), taps[14:18].copy()
    drafted[1 + num_held :] += 1  # where they did not hold, the model read something else
    seen[1 + num_held :] += 1.0
    pair.follow([(1, 14, drafted % VOCAB_SIZE, seen)])
    known = 14 + 1 + num_held + 1
    pair.settle(1, tokens[:known])
    assert pair.draft({1: 4})[1] == pair.expected(1, tokens[:known], taps, 4)


def test_a_prefix_that_another_row_read(tmp_path: Path, device: str) -> None:
    """The first slot behind it is made from what was kept of its last block; the row itself held another stream."""
    pair = make_pair(tmp_path, device, 0)
    tokens, taps = text(1, 37)
    other, other_taps = text(2, 20)
    pair.follow([(0, 0, tokens[:36], taps[:36]), (1, 0, other, other_taps)])
    pair.tables[1, :2] = pair.tables[0, :2]
    pair.rows.tables[1, 1] = torch.from_numpy(pair.tables[1]).to(device)
    pair.follow([(1, 32, tokens[32:36], taps[32:36])])
    pair.settle(1, tokens)
    assert pair.draft({1: 3})[1] == pair.expected(1, tokens, taps, 3)


def test_scores_that_are_not_finite_are_no_draft(tmp_path: Path, device: str) -> None:
    pair = make_pair(tmp_path, device, 0)
    tokens, taps = text(1, 9)
    taps[7] = np.nan
    pair.follow([(0, 0, tokens[:8], taps[:8])])
    pair.settle(0, tokens)
    assert pair.draft({0: 2})[0] == [-1, -1]
