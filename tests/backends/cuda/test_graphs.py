from itertools import pairwise

import pytest
import torch

from twostroke.backends.cuda.compile_ahead import compilers, rehearsal
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
    graphs.prepare("key", lambda: done.append("prepared"))
    for number in range(3):
        graphs.run("key", lambda number=number: done.append(number))
    assert done == [0, 1, 2]
    assert len(graphs) == 0 and "key" not in graphs


def test_a_rehearsal_runs_the_work_and_captures_nothing(device):
    graphs, done = GraphCache(torch.device(device)), []
    with compilers() as threads, rehearsal(threads):
        graphs.prepare("key", lambda: done.append("rehearsed"))
    assert done == ["rehearsed"] and "key" not in graphs


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
    graphs.prepare("key", work)
    assert len(calls) == 2 and len(graphs) == 1 and "key" in graphs
