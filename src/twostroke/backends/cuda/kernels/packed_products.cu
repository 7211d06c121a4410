// out = x @ weight^T with weights of few bits, perhaps gated. A producer thread keeps a ring of copies full, and has
// it full of weights before the kernel ahead has ended; warp groups multiply from it. Several programs may divide the
// depth: each leaves its sums to the reader. FLOAT32: whether sums are stored as they are. Behind packed.cuh.

// Groups that took turns lay out their sums, and each adds up those of some tokens, in order. There was but one tile, so
// the ring is free.
__device__ __forceinline__ void add_up(float (&sums)[UNITS][ROWS / 2], u32 ring, u32 group, u32 thread) {
  constexpr u32 BLOCKS = ROWS / 8, PITCH = 128 * 16;  // four sums of each thread
  meet<128 * GROUPS>(1);
#pragma unroll
  for (u32 unit = 0; unit < UNITS; unit++) {
#pragma unroll
    for (u32 block = 0; block < BLOCKS; block++) {
      float* own = &sums[unit][block * 4];
      u32 to = ring + ((group * UNITS + unit) * BLOCKS + block) * PITCH + thread * 16;
      store_four(to, own[0], own[1], own[2], own[3]);
    }
  }
  meet<128 * GROUPS>(1);
#pragma unroll
  for (u32 unit = 0; unit < UNITS; unit++) {
#pragma unroll
    for (u32 block = 0; block < BLOCKS; block++) {
      if (block % GROUPS != group) continue;
      float* own = &sums[unit][block * 4];
#pragma unroll
      for (u32 i = 0; i < 4; i++) own[i] = 0;
      for (u32 other = 0; other < GROUPS; other++) {
        uint4 found = load_sixteen(ring + ((other * UNITS + unit) * BLOCKS + block) * PITCH + thread * 16);
        own[0] += __uint_as_float(found.x);
        own[1] += __uint_as_float(found.y);
        own[2] += __uint_as_float(found.z);
        own[3] += __uint_as_float(found.w);
      }
    }
  }
}

struct Tile {
  int first_unit, first_round, part;
  __device__ Tile(int index, int out_tiles, int rounds) {
    part = index / out_tiles;
    first_unit = (index - part * out_tiles) * TILE_UNITS;
    first_round = part * rounds;
  }
};

struct Producer {
  const TensorMap *x_map, *w_map;  // that of weights which lie by rows
  const char* weights;             // or which lie in units
  u32 ring, ready, empty;
  int outputs, units, depth_rounds, rounds, out_tiles, tiles;

  __device__ __forceinline__ void fetch_weights(const Tile& tile, int j, u32 stage) {
    u32 to = ring + stage * STAGE_BYTES + TOKEN_BYTES, arrived = ready + stage * 8;
    int held = min((int)TILE_UNITS, units - tile.first_unit);
    expect_bytes(arrived, TOKEN_BYTES + held * UNIT_BYTES);
    for (int unit = 0; unit < held; unit++, to += UNIT_BYTES) {
      if constexpr (CODE == 8) {
        int pair = (tile.first_round + j) * DEPTH / 2, row = (tile.first_unit + unit) * (GATED ? 32 : 64);
        fetch(w_map, pair, row, to, arrived);
        if constexpr (GATED) fetch(w_map, pair, outputs + row, to + UNIT_BYTES / 2, arrived);
      } else {
        u64 round = (u64)(tile.first_unit + unit) * depth_rounds + tile.first_round + j;
        fetch_bytes(weights + round * UNIT_BYTES, UNIT_BYTES, to, arrived);
      }
    }
  }

  __device__ __forceinline__ void run() {
    Tile begun(blockIdx.x, out_tiles, rounds);
    for (int j = 0; j < min(rounds, (int)STAGES); j++) fetch_weights(begun, j, j);
    let_next_kernel_start();
    wait_for_kernel_ahead();
    Place place{0, 1};  // of the lap before: the first one's stages are free
    for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
      Tile tile(index, out_tiles, rounds);
      for (int j = 0; j < rounds; j++) {
        if (index != blockIdx.x || j >= STAGES) {
          wait_for(empty + place.stage * 8, place.parity);
          fetch_weights(tile, j, place.stage);
        }
        for (u32 slice = 0; slice < DEPTH / 64; slice++) {
          u32 to = ring + place.stage * STAGE_BYTES + slice * SLICE_BYTES;
          fetch(x_map, (tile.first_round + j) * DEPTH + slice * 64, 0, to, ready + place.stage * 8);
        }
        place.advance();
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), AT_ONCE)
    product(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, const char* weights,
            const float* factors, char* out, int num_rows, int outputs, int units, int depth_rounds, int rounds,
            int out_tiles, int tiles) {
  extern __shared__ char shared[];
  __shared__ u64 barriers[2 * STAGES];
  u32 ring = (shared_address(shared) + 1023) / 1024 * 1024;
  u32 ready = shared_address(barriers), empty = ready + STAGES * 8;
  if (threadIdx.x == 0) {
    for (u32 stage = 0; stage < STAGES; stage++) {
      init_barrier(ready + stage * 8, 1);
      init_barrier(empty + stage * 8, CONSUMER_WARPS);
    }
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    give_registers<PRODUCER_REGISTERS>();
    Producer producer{&x_map, &w_map, weights,      ring,   ready,     empty, outputs,
                      units,  depth_rounds, rounds, out_tiles, tiles};
    if (threadIdx.x == 0) producer.run();
    return;
  }
  take_registers<CONSUMER_REGISTERS>();
  u32 group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128;
  float sums[UNITS][ROWS / 2];
  Place place{SHARED ? group : 0, 0};
  for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
    Tile tile(index, out_tiles, rounds);
    multiply_tile(sums, ring, empty, place, rounds, group, thread,
                  [&](const Place& at, int) { wait_for(ready + at.stage * 8, at.parity); });
    if constexpr (SHARED) add_up(sums, ring, group, thread);
#pragma unroll
    for (u32 i = 0; i < UNITS; i++) {
      u32 unit = tile.first_unit + (SHARED ? 0 : group * UNITS) + i;
      if (unit >= units) break;
      if constexpr (FLOAT32) {
        float* part = (float*)out + (u64)tile.part * num_rows * outputs;
        store_unit(sums[i], factors, nullptr, part, unit, outputs, num_rows, thread, group);
      } else {
        store_unit(sums[i], factors, nullptr, (unsigned short*)out, unit, outputs, num_rows, thread, group);
      }
    }
  }
}
