import numpy as np
import pytest
import torch

from twostroke.backends.cuda.staging import ALIGNED_BYTES, DEPTH, Staging, UploadRing


def integers(*numbers):
    return np.array(numbers, dtype=np.int32)


def test_arrays_arrive_where_views_of_their_sizes_are(device):
    staging = Staging(32, torch.device(device))
    staging.send((integers(1, 2, 3), integers(), integers(4), integers(5, 6, 7, 8, 9)))
    views = staging.views((3, 0, 1, 5))
    assert [view.tolist() for view in views] == [[1, 2, 3], [], [4], [5, 6, 7, 8, 9]]
    assert all(view.dtype == torch.int32 and view.device.type == device for view in views)


def test_every_array_begins_at_16_bytes(device):
    views = Staging(64, torch.device(device)).views((1, 5, 3, 4, 2))
    base = views[0].data_ptr()
    assert [view.data_ptr() - base for view in views] == [0, 16, 48, 64, 80]
    assert ALIGNED_BYTES == 16


def test_the_same_sizes_are_the_same_tensors_which_captured_graphs_rely_on(device):
    staging = Staging(16, torch.device(device))
    first = staging.views((4, 4))
    staging.send((integers(1, 2, 3, 4), integers(5, 6, 7, 8)))
    assert all(one is other for one, other in zip(first, staging.views((4, 4)), strict=True))
    assert first[1].tolist() == [5, 6, 7, 8]
    staging.send((integers(9),))
    assert first[0].tolist() == [9, 2, 3, 4], "what is not sent stays as it was"


def test_the_last_array_may_end_with_the_buffer_and_none_beyond_it(device):
    staging = Staging(6, torch.device(device))
    staging.send((integers(1), integers(2, 3)))
    with pytest.raises(ValueError, match="7 numbers for a buffer of 6"):
        staging.send((integers(1), integers(2, 3, 4)))


def test_buffers_are_used_in_turn_and_each_send_arrives(device):
    """On a card a send that did not wait for its buffer's last copy would overtake it."""
    staging = Staging(1 << 16, torch.device(device))
    (view,) = staging.views((1 << 16,))
    copies = []
    for number in range(3 * DEPTH):
        staging.send((np.full(1 << 16, number, dtype=np.int32),))
        copies.append(view.clone())
    assert [copy.unique().tolist() for copy in copies] == [[number] for number in range(3 * DEPTH)]


def test_an_upload_ring_grows_and_each_upload_arrives(device):
    ring = UploadRing(torch.int64, torch.device(device))
    copies = []
    for number in range(3 * DEPTH):
        target = torch.zeros(300, dtype=torch.int64, device=device)
        ring.send((np.full(20 * (number + 1), number + 1, dtype=np.int64),), target)
        copies.append(target)
    for number, copy in enumerate(copies):
        assert copy.tolist() == [number + 1] * 20 * (number + 1) + [0] * (300 - 20 * (number + 1))
