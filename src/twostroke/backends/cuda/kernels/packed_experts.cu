// Rows sorted by expert (moe_routing.py), each tile of them times its own expert's weights of twelve bits. A program an
// SM walks over tiles of (expert, rows, units of outputs); its ring runs on from tile to tile. GATED: inputs are the
// tokens' own, row by row; else they lie in the order of the results. EXPERTS: how many there are. Behind packed.cuh.

struct Walk {
  const int* starts;  // in shared memory, of every expert and behind the last
  int expert, own, out_tiles;

  __device__ __forceinline__ int row_tiles() const {
    return (starts[expert + 1] - starts[expert] + (int)ROWS - 1) / (int)ROWS;
  }
  // From a tile of an expert, perhaps beyond its last, to the expert whose it is; behind the last: EXPERTS.
  __device__ __forceinline__ bool settle() {
    while (expert < EXPERTS) {
      int tiles = row_tiles() * out_tiles;
      if (own < tiles) return true;
      own -= tiles;
      expert++;
    }
    return false;
  }
  // Tiles that read the same weights are neighbours, so that the cache serves all but the first.
  __device__ __forceinline__ int first_row() const { return starts[expert] + own % row_tiles() * (int)ROWS; }
  __device__ __forceinline__ int first_unit() const { return own / row_tiles() * (int)TILE_UNITS; }
  __device__ __forceinline__ int end() const { return starts[expert + 1]; }
};

__device__ __forceinline__ void copy_sixteen(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// What the producer, one warp, does: a lane copies sixteen bytes of every fourth row.
struct Producer {
  const char *inputs, *weights;
  const int* sorted_pairs;
  u32 ring, ready, empty;
  int units, width, top_k;

  __device__ __forceinline__ void run(Walk walk) {
    Place place{0, 1};
    u32 lane = threadIdx.x % 32, chunk = lane % 8;
    int rounds = width / (int)DEPTH;
    for (; walk.settle(); walk.own += gridDim.x) {
      int first = walk.first_row(), end = walk.end(), first_unit = walk.first_unit();
      int held = min((int)TILE_UNITS, units - first_unit);
      const char* sources[ROWS / 4];
#pragma unroll
      for (u32 i = 0; i < ROWS / 4; i++) {
        int row = first + (int)(lane / 8 + i * 4);
        sources[i] = nullptr;
        if (row < end) {
          u64 source = GATED ? sorted_pairs[row] / top_k : row;
          sources[i] = inputs + (source * width + chunk * 8) * 2;
        }
      }
      const char* from = weights + ((u64)walk.expert * units + first_unit) * rounds * UNIT_BYTES;
      for (int j = 0; j < rounds; j++) {
        u32 tokens = ring + place.stage * STAGE_BYTES, arrived = ready + place.stage * 8;
        wait_for(empty + place.stage * 8, place.parity);
        if (lane == 0) {
          expect_bytes(arrived, held * UNIT_BYTES);
          for (int unit = 0; unit < held; unit++) {
            u64 round = (u64)unit * rounds + j;
            fetch_bytes(from + round * UNIT_BYTES, UNIT_BYTES, tokens + ROWS * ROW_BYTES + unit * UNIT_BYTES, arrived);
          }
        }
#pragma unroll
        for (u32 i = 0; i < ROWS / 4; i++) {
          u32 row = lane / 8 + i * 4;
          if (sources[i]) copy_sixteen(tokens + row * ROW_BYTES + (chunk ^ row % 8) * 16, sources[i] + j * ROW_BYTES);
        }
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(arrived) : "memory");
        place.advance();
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
    experts_product(const char* inputs, const char* weights, const float* factors, char* out, const int* sorted_pairs,
                    const int* starts, int outputs, int units, int width, int out_tiles, int top_k) {
  extern __shared__ char shared[];
  __shared__ u64 barriers[2 * STAGES];
  __shared__ int own_starts[EXPERTS + 1];
  u32 ring = (shared_address(shared) + 1023) / 1024 * 1024;
  u32 ready = shared_address(barriers), empty = ready + STAGES * 8;
  if (threadIdx.x == 0) {
    for (u32 stage = 0; stage < STAGES; stage++) {
      init_barrier(ready + stage * 8, 1 + 32);  // weights, and the lanes that copy rows
      init_barrier(empty + stage * 8, CONSUMER_WARPS);
    }
    publish_barriers();
  }
  if constexpr (DEPENDENT) {
    // The trigger comes after the wait: what starts then may read `starts`, as this very kernel does below.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  }
  for (u32 i = threadIdx.x; i <= EXPERTS; i += blockDim.x) own_starts[i] = starts[i];
  __syncthreads();
  Walk walk{own_starts, 0, (int)blockIdx.x, out_tiles};
  if (threadIdx.x < 128) {
    give_registers<PRODUCER_REGISTERS>();
    Producer producer{inputs, weights, sorted_pairs, ring, ready, empty, units, width, top_k};
    if (threadIdx.x < 32) producer.run(walk);
    return;
  }
  take_registers<CONSUMER_REGISTERS>();
  u32 group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128;
  float sums[UNITS][ROWS / 2];
  Place place{0, 0};
  for (; walk.settle(); walk.own += gridDim.x) {
    // Rows were written by threads, and are read by tensor cores.
    multiply_tile(sums, ring, ready, empty, place, width / (int)DEPTH, group, thread, [] { show_to_engines(); });
    int first = walk.first_row();
    const float* own_factors = factors + (u64)walk.expert * units * 64;
#pragma unroll
    for (u32 i = 0; i < UNITS; i++) {
      u32 unit = walk.first_unit() + group * UNITS + i;
      if (unit >= units) break;
      unsigned short* to = (unsigned short*)out + (u64)first * outputs;
      store_unit(sums[i], own_factors, to, unit, outputs, walk.end() - first, thread);
    }
  }
}
