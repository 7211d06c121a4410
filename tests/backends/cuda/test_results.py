import torch

from twostroke.backends.cuda.results import Results, sampling_ids
from twostroke.backends.host.host_backend import NOT_FINITE
from twostroke.core.step import DecodeSlot, PrefillChunk, SampledToken, Step, TokenLogprobs

STEP = Step(
    7,
    prefills=(
        PrefillChunk(12, start=4, token_ids=(20, 21), samples=False, prompt_logprobs=1),
        PrefillChunk(13, start=0, token_ids=(30, 31), samples=True),
    ),
    decodes=(DecodeSlot(11, 5), DecodeSlot(10, 9)),
)


def tokens(device, *numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def collect(device, *numbers, **readers):
    results = Results(4, torch.device(device))
    return results.collect(STEP, results.start(), tokens(device, *numbers), **readers).result()


def test_tokens_belong_to_decodes_first_and_then_to_the_chunks_that_sample(device):
    assert sampling_ids(STEP) == [11, 10, 13]
    result = collect(device, 5, 6, 7)
    assert result.step_id == 7 and not result.errors and result.compute_s > 0
    assert result.sampled == {11: (SampledToken(5),), 10: (SampledToken(6),), 13: (SampledToken(7),)}


def test_no_token_is_an_error_of_its_sequence_alone(device):
    result = collect(device, 5, -1, 7, logprobs={10: lambda number: 1 / 0})
    assert result.errors == {10: NOT_FINITE}
    assert set(result.sampled) == {11, 13}


def test_logprobs_are_read_when_the_step_is_done(device):
    read = TokenLogprobs(5, -1.5, ((5, -1.5),))
    prompt = (TokenLogprobs(21, -2.0),)
    result = collect(device, 5, 6, 7, logprobs={11: lambda number: read}, prompt_logprobs={12: lambda: prompt})
    assert result.sampled[11] == (SampledToken(5, read),) and result.sampled[10] == (SampledToken(6),)
    assert result.prompt_logprobs == {12: prompt} and not result.errors


def test_a_prompt_whose_logits_are_not_finite_is_an_error(device):
    result = collect(device, 5, 6, 7, prompt_logprobs={12: lambda: None})
    assert result.errors == {12: NOT_FINITE} and not result.prompt_logprobs


def test_tickets_in_flight_keep_their_own_tokens_and_places_are_reused(device):
    results = Results(4, torch.device(device))
    on_device = tokens(device, 0, 0, 0)
    places, tickets = [], []
    for number in range(3):
        arrival = results.start()
        on_device.fill_(number)
        tickets.append(results.collect(STEP, arrival, on_device))
        places.append(arrival)
    assert len({id(place) for place in places}) == 3
    for number, ticket in enumerate(tickets):
        found = ticket.result()
        assert {token.token_id for (token,) in found.sampled.values()} == {number}
        assert ticket.ready and ticket.result() is found
    assert results.start() in places, "a place that was read is free"
