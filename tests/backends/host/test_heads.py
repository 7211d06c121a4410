"""A head's arithmetic in numpy against transformers' own parts put together as published: a whole text at once there,
slot by slot in scattered blocks here; then a chain in which the head reads its own hidden states."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.models.heads.published import HIDDEN_SIZE, VOCAB_SIZE, PublishedHead, medusa_tensors
from tests.models.heads.test_head_files import target

from twostroke.backends.host.eagle3 import Eagle3Network
from twostroke.backends.host.medusa import MedusaNetwork
from twostroke.models.heads.eagle3 import load_eagle3
from twostroke.models.heads.medusa import load_medusa

BLOCK_SIZE, NUM_BLOCKS, COUNT, CHAIN = 4, 16, 21, 4
VARIANTS = [
    ("llama", {}),
    ("llama", {"norm_before_residual": True, "norm_output": True}),
    ("llama", {"norm_before_fc": True}),
    ("qwen3", {"fc_norm": True}),
]


@pytest.mark.parametrize(("kind", "flags"), VARIANTS)
@pytest.mark.parametrize("embedding", [False, True])
def test_slots_and_a_chain_agree_with_the_published_order(tmp_path, kind, flags, embedding):
    torch.manual_seed(3)
    rng = np.random.default_rng(4)
    published = PublishedHead(kind, embedding=embedding, **flags)
    head = load_eagle3(published.save(tmp_path / "head"), target())
    table = rng.standard_normal((VOCAB_SIZE, HIDDEN_SIZE)).astype(np.float32)
    network = Eagle3Network(
        head,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_context=256,
        embed=table.__getitem__,
        output=lambda: np.zeros(0, np.float32),
    )
    embed = published.embed_tokens.weight.detach() if embedding else torch.from_numpy(table)
    tokens = rng.integers(0, VOCAB_SIZE, COUNT).astype(np.int32)
    taps = rng.standard_normal((COUNT, 3 * HIDDEN_SIZE)).astype(np.float32)
    blocks = rng.permutation(NUM_BLOCKS).astype(np.int32)[None]

    # Token p beside the hidden state of p - 1. Rotation is of distances alone: there it begins at 0, here at 1.
    joined = published.join(torch.from_numpy(taps)).detach()
    states = list(joined[:-1])
    read = list(tokens[1:])
    positions = np.arange(1, COUNT, dtype=np.int32)
    ours = network.join(taps)
    np.testing.assert_allclose(ours, joined.numpy(), atol=2e-5)
    network.write(tokens[1:-1], ours[:-2], positions[:-1], np.repeat(blocks, COUNT - 2, axis=0))
    state, position = ours[-2:-1], positions[-1:]
    for _ in range(CHAIN):
        expected, scores = published(embed[torch.tensor(np.array(read), dtype=torch.long)], torch.stack(states))
        state, found = network.step(np.array(read[-1:], dtype=np.int32), state, position, blocks, np.ones(1, np.int32))
        np.testing.assert_allclose(found[0], scores[-1].numpy(), atol=2e-4)
        np.testing.assert_allclose(state[0], expected[-1].numpy(), atol=2e-4)
        states.append(expected[-1])
        read.append(int(head.target_ids[int(found[0].argmax())]))
        position = position + 1


def test_a_prefix_that_is_left_out_changes_the_guess(tmp_path):
    """Slots matter: a head that forgot them would pass no comparison by luck alone."""
    torch.manual_seed(3)
    head = load_eagle3(PublishedHead().save(tmp_path / "head"), target())
    rng = np.random.default_rng(5)
    table = rng.standard_normal((VOCAB_SIZE, HIDDEN_SIZE)).astype(np.float32)
    sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "max_context": 256}
    found = []
    for written in (8, 4):
        network = Eagle3Network(head, **sizes, embed=table.__getitem__, output=lambda: table)
        positions = np.arange(1, 1 + written, dtype=np.int32)
        blocks = np.arange(NUM_BLOCKS, dtype=np.int32)[None]
        hidden = np.ones((written, HIDDEN_SIZE), np.float32)
        network.write(positions, hidden, positions, np.repeat(blocks, written, axis=0))
        nine = np.array([9], np.int32)
        found.append(network.step(nine, hidden[:1], nine, blocks, np.ones(1, np.int32))[1])
    assert np.abs(found[0] - found[1]).max() > 1e-3


def test_a_slot_without_a_block_is_an_error(tmp_path):
    torch.manual_seed(3)
    head = load_eagle3(PublishedHead().save(tmp_path / "head"), target())
    table = np.zeros((VOCAB_SIZE, HIDDEN_SIZE), np.float32)
    network = Eagle3Network(
        head, num_blocks=2, block_size=4, max_context=256, embed=table.__getitem__, output=lambda: table
    )
    one = np.ones(1, np.int32)
    with pytest.raises(IndexError, match="never granted"):
        network.write(one, np.ones((1, HIDDEN_SIZE), np.float32), one, np.full((1, 2), -1, np.int32))


def test_medusa_heads_agree_with_torch(tmp_path):
    torch.manual_seed(6)
    tensors = medusa_tensors(3, 2, False)
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 2}))
    save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    network = MedusaNetwork(load_medusa(tmp_path, target()))
    hidden = torch.randn(5, HIDDEN_SIZE)
    found = network.scores(hidden.numpy(), 2)
    assert found.shape == (2, 5, VOCAB_SIZE)
    for head in range(2):
        state = hidden
        for block in range(2):
            name = f"{head}.{block}.linear"
            linear = torch.nn.functional.linear(state, tensors[f"{name}.weight"], tensors[f"{name}.bias"])
            state = state + torch.nn.functional.silu(linear)
        np.testing.assert_allclose(found[head], (state @ tensors[f"{head}.2.weight"].T).numpy(), atol=1e-4)
