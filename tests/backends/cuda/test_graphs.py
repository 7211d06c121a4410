from contextlib import suppress
from itertools import pairwise

import pytest
import torch

from twostroke.backends.cuda.graphs import GraphCache, buckets_up_to


@pytest.mark.parametrize("limit", [1, 2, 5, 6, 8, 9, 16, 64, 100, 512, 1000])
def test_buckets_rise_to_the_limit(limit):
    buckets = buckets_up_to(limit)
    assert list(buckets) == sorted(set(buckets)) and buckets[0] == 1 and buckets[-1] == limit
    assert all(high - low <= max(8, low // 8) for low, high in pairwise(buckets))


def test_few_graphs_serve_many_batch_sizes():
    assert buckets_up_to(8) == (1, 2, 3, 4, 6, 8)
    assert len(buckets_up_to(512)) <= 40


def test_on_a_host_the_work_is_simply_done():
    graphs, done = GraphCache(torch.device("cpu")), []
    graphs.prepare("key", lambda: done.append("prepared"), lambda: done.append("sampled"))
    for number in range(3):
        graphs.run("key", lambda number=number: done.append(number))
    assert done == [0, 1, 2]
    assert len(graphs) == 0 and "key" not in graphs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need a CUDA device")
def test_a_graph_replays_what_was_captured_first():
    graphs = GraphCache(torch.device("cuda"))
    total, calls = torch.zeros(1, device="cuda"), []

    def work():
        calls.append(1)
        total.add_(1)

    for _ in range(5):
        graphs.run("key", work)
    assert total.item() == 5 and len(calls) == 2, "run once, captured once, then replayed"
    graphs.prepare("key", work, work)
    assert len(calls) == 2 and len(graphs) == 1 and "key" in graphs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need a CUDA device")
def test_a_graph_is_captured_whole_behind_its_sample():
    graphs = GraphCache(torch.device("cuda"))
    layers, calls = torch.zeros(4, device="cuda"), []

    def work(num_layers=4):
        calls.append(num_layers)
        for layer in range(num_layers):
            layers[layer].add_(1)

    graphs.prepare("key", work, lambda: work(1))
    assert calls == [1, 4] and layers.tolist() == [1, 0, 0, 0]
    graphs.run("key", work)
    assert len(calls) == 2 and layers.tolist() == [2, 1, 1, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need a CUDA device")
@pytest.mark.parametrize("is_last", [False, True])
def test_a_capture_that_meets_something_new_is_made_again(is_last):
    """Waiting for the device is forbidden while capturing, and so is what waits within: loading, say."""
    graphs = GraphCache(torch.device("cuda"))
    x, weight = torch.ones(64, 64, device="cuda"), torch.eye(64, device="cuda")
    out, met = torch.zeros(64, 64, device="cuda"), []

    def work(is_sample=False):
        is_new = not is_sample and not met
        torch.mm(x, weight, out=out)
        if is_new and not is_last:
            met.append("what raises")
            torch.cuda.synchronize()
        out.add_(torch.ones_like(out))  # of the graph's own memory
        if is_new and is_last:
            met.append("what is seen when the capture ends")
            with suppress(RuntimeError):
                torch.cuda.synchronize()

    def add_one():
        out.add_(torch.ones_like(out))

    graphs.prepare("first", out.zero_, out.zero_)
    graphs.prepare("new", work, lambda: work(is_sample=True))
    graphs.prepare("behind", add_one, add_one)
    assert met and len(graphs) == 3
    for number in range(3):
        x.fill_(number)
        for key in ("first", "new", "behind"):
            graphs.run(key, lambda: pytest.fail("this was captured"))
        elsewhere = torch.full((64, 64), 7.0, device="cuda")  # the allocator serves others as before
        assert (out == number + 2).all() and (elsewhere == 7).all()
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need a CUDA device")
def test_a_step_that_cannot_be_captured_is_run_all_the_same():
    graphs, total = GraphCache(torch.device("cuda")), torch.zeros(1, device="cuda")

    def work():
        total.add_(1)
        if torch.cuda.is_current_stream_capturing():
            raise torch.cuda.OutOfMemoryError("for a graph")

    for number in range(1, 4):
        graphs.run("key", work)
        assert total.item() == number and "key" not in graphs
    graphs.run("another", lambda: total.zero_())
    graphs.run("another", lambda: pytest.fail("this was captured"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need a CUDA device")
def test_work_that_fails_by_itself_says_so_and_spoils_nothing():
    graphs = GraphCache(torch.device("cuda"))
    total = torch.zeros(1, device="cuda")

    def add_one():
        total.add_(1)

    def fail():
        add_one()
        raise ValueError("as ever")

    with pytest.raises(ValueError, match="as ever"):
        graphs.prepare("failing", fail, add_one)
    assert "failing" not in graphs
    total.zero_()
    graphs.prepare("key", add_one, add_one)
    graphs.run("key", lambda: pytest.fail("this was captured"))
    assert total.item() == 2
