"""The CUDA backend: executes Steps on one device. A step of decodes alone replays a captured graph, sampling included;
so does a short prefill; any other step runs the model over all its tokens. Launching returns at once: sampled tokens
stay on the device, where the next step finds them, and the host reads them when they have arrived."""

from __future__ import annotations

import time

import numpy as np
import torch

from twostroke.backends.cuda.attention import Attention
from twostroke.backends.cuda.graphs import GraphCache, buckets_up_to
from twostroke.backends.cuda.kernels.embedding import FROM_ROW
from twostroke.backends.cuda.kernels.target import target_of
from twostroke.backends.cuda.kv_store import KVStore
from twostroke.backends.cuda.model import Buffers, Decoder, TokenArrays
from twostroke.backends.cuda.results import CudaTicket, Results
from twostroke.backends.cuda.rows import DeviceRows
from twostroke.backends.cuda.sampling import SamplingFeatures, SamplingRows
from twostroke.backends.cuda.staging import Staging
from twostroke.backends.cuda.weights import Progress, Weights
from twostroke.core.kv_layout import KVLayout
from twostroke.core.step import Step
from twostroke.models.checkpoint import Checkpoint

Integers = np.ndarray[tuple[int], np.dtype[np.int32]]


class CudaBackend:
    name = "cuda"

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: KVLayout,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_context: int,
        max_tokens_per_step: int,
        max_running: int,
        progress: Progress | None = None,
    ) -> None:
        spec = checkpoint.spec
        started_s = time.perf_counter()
        self._device = device
        self._pdl = target_of(device).has_pdl
        weights = Weights.from_checkpoint(checkpoint, device, dtype, progress)
        loaded_s = time.perf_counter()
        max_rows = min(max_running, max_tokens_per_step)
        self.rows = DeviceRows(layout, max_rows, max_context, SamplingRows(max_rows, spec.vocab_size, device), device)
        self._buckets = buckets_up_to(max_rows)
        kv = KVStore(spec, layout, device, dtype)
        self._attention = Attention.choose(spec, layout, device, dtype, max_tokens_per_step, max_rows)
        self._decoder = Decoder(
            spec,
            weights,
            kv,
            self._attention,
            Buffers(spec, max_tokens_per_step, max_rows, device, dtype),
            self.rows.tables,
            self.rows.last_tokens,
            max_context,
        )
        self._staging = Staging(STAGED_PER_TOKEN * max_tokens_per_step + 1024, device)
        self._from_rows = torch.full((max_rows,), FROM_ROW, dtype=torch.int32, device=device)
        self._tokens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._results = Results(max_rows, device)
        self._graphs = GraphCache(device)
        self._prepare()
        self.notes = (
            f"weights in {loaded_s - started_s:.1f} s, kernels and {len(self._graphs)} graphs in "
            f"{time.perf_counter() - loaded_s:.1f} s",
            *self._attention.notes,
        )

    def launch(self, step: Step) -> CudaTicket:
        self.rows.update(step)
        arrival = self._results.start()
        if step.prefills:
            return self._launch_prefill(step, arrival)
        return self._launch_decode(step, arrival)

    def close(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    # Decode: a batch size has a graph, and a step sends two integers a stream.

    def _launch_decode(self, step: Step, arrival: Arrival) -> CudaTicket:
        row_of = self.rows.index_of
        rows = [row_of[slot.seq_id] for slot in step.decodes]
        if not rows:
            return self._results.collect(step, arrival, self._tokens[:0])
        bucket = self._bucket(len(rows))
        self._send_decodes(bucket, rows, [slot.position for slot in step.decodes])
        features = self.rows.sampling.features(rows)
        if features.filters or features.edits:
            self._graphs.run(("logits", bucket), lambda: self._decode(bucket, None))
            self._sample(self._staging.views((bucket, bucket))[0][: len(rows)], features)
        else:
            self._graphs.run(("decode", bucket), lambda: self._decode(bucket, PLAIN))
        return self._results.collect(step, arrival, self._tokens[: len(rows)], self._logprobs(step, rows))

    def _bucket(self, count: int) -> int:
        return self._buckets[bisect_left(self._buckets, count)]

    def _send_decodes(self, bucket: int, rows: list[int], positions: list[int]) -> None:
        padded_rows = np.full(bucket, self.rows.padding_row, dtype=np.int32)
        padded_positions = np.zeros(bucket, dtype=np.int32)
        padded_rows[: len(rows)] = rows
        padded_positions[: len(rows)] = positions
        self._staging.send((padded_rows, padded_positions))

    def _decode(self, bucket: int, features: SamplingFeatures | None) -> None:
        """A step of `bucket` decodes whose rows and positions lie in the staging buffer; without features, up to its
        logits."""
        rows, positions = self._staging.views((bucket, bucket))
        tokens = TokenArrays(self._from_rows[:bucket], rows, positions)
        residual = self._decoder.forward(tokens, bucket, None, pdl=self._pdl)
        self._decoder.logits(residual, None, pdl=self._pdl)
        if features is not None:
            self._sample(rows, features, pdl=self._pdl)

    def _sample(self, rows: torch.Tensor, features: SamplingFeatures, *, pdl: bool = False) -> None:
        logits, tokens = self._buffers.logits[: len(rows)], self._tokens[: len(rows)]
        self.rows.sampling.sample(logits, rows, self.rows.last_tokens, tokens, features, pdl=pdl)

    # Prefill: all tokens of the step in one pass, whatever their number; a short tail alone replays a graph.

    def _launch_prefill(self, step: Step, arrival: Arrival) -> CudaTicket:
        pad_to = self._tail_bucket(step)
        batch = Batch.from_step(step, self.rows.index_of, pad_to=pad_to, padding_row=self.rows.padding_row)
        arrays, tiles = self._send_batch(batch, pad_to)
        if pad_to:
            self._graphs.run(("tail", pad_to), lambda: self._prefill(arrays, 0, tiles, PLAIN))
            return self._results.collect(step, arrival, self._tokens[:1])
        self._prefill(arrays, batch.num_decodes, tiles, None)
        prompt_logprobs = self._prompt_logprobs(step, batch)
        rows = batch.sampled_rows.tolist()
        if rows:
            residual = self._buffers.residual[: batch.num_tokens]
            self._decoder.logits(residual, arrays[SAMPLED_TOKENS])
            self._sample(arrays[SAMPLED_ROWS], self.rows.sampling.features(rows))
        return self._results.collect(
            step, arrival, self._tokens[: len(rows)], self._logprobs(step, rows), prompt_logprobs
        )

    def _tail_bucket(self, step: Step) -> int:
        """The padded size of a step that is one short chunk, plainly sampled; 0 for any other."""
        if step.decodes or len(step.prefills) != 1:
            return 0
        (chunk,) = step.prefills
        features = self.rows.sampling.features([self.rows.index_of[chunk.seq_id]])
        is_plain = not (features.filters or features.edits) and chunk.prompt_logprobs is None
        wants_logprobs = self.rows.sampling.logprobs_wanted(self.rows.index_of[chunk.seq_id]) is not None
        if not chunk.samples or not is_plain or wants_logprobs or len(chunk.token_ids) > TAIL_BUCKETS[-1]:
            return 0
        return TAIL_BUCKETS[bisect_left(TAIL_BUCKETS, len(chunk.token_ids))]
