// Rows sorted by expert (moe_routing.py), each tile of them times its own expert's weights of few bits. A program an
// SM walks over tiles of (expert, rows, units of outputs); its ring runs on from tile to tile. GATED: inputs are the
// tokens' own, row by row; else they lie in the order of the results. EXPERTS: how many there are. Weights of inputs
// beyond the last are zeros, and so is what is read for them. Behind packed.cuh.

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

// What the producer, one warp, does. Tokens' own rows lie anywhere: a lane copies sixteen bytes of every fourth one. (The
// copy engine could fetch them row by row, and takes a quarter to a half longer.) Rows in order come by the copy engine.
struct Producer {
  const TensorMap* x_map;
  const char *inputs, *weights;
  const int* sorted_pairs;
  u32 ring, ready, empty, guessed;
  int units, rounds, width, top_k;

  __device__ __forceinline__ void fetch_weights(const char* from, int held, int j, u32 stage, u32 arrived) {
    u32 to = ring + stage * STAGE_BYTES + TOKEN_BYTES;
    for (int unit = 0; unit < held; unit++) {
      u64 round = (u64)unit * rounds + j;
      fetch_bytes(from + round * UNIT_BYTES, UNIT_BYTES, to + unit * UNIT_BYTES, arrived);
    }
  }

  __device__ __forceinline__ const char* weights_of(int expert, int first_unit) {
    return weights + ((u64)expert * units + first_unit) * rounds * UNIT_BYTES;
  }

  // Weights never change, so they are on their way before the kernel ahead has ended, as far as is known which: those of
  // the tile that this program has if every expert has one tile of rows.
  __device__ __forceinline__ void guess(int expert, int first_unit) {
    int held = min((int)TILE_UNITS, units - first_unit);
    for (int j = 0; j < min(rounds, (int)STAGES); j++) {
      expect_bytes(guessed + j * 8, held * UNIT_BYTES);
      fetch_weights(weights_of(expert, first_unit), held, j, j, guessed + j * 8);
    }
  }

  // `ahead`: rounds of a guess, right or not, that are on their way.
  __device__ __forceinline__ void run(Walk walk, int ahead, bool is_right) {
    Place place{0, 1};
    u32 lane = threadIdx.x, chunk = lane % 8;
    for (; walk.settle(); walk.own += gridDim.x) {
      int first = walk.first_row(), end = walk.end(), first_unit = walk.first_unit();
      int held = min((int)TILE_UNITS, units - first_unit);
      const char* sources[ROWS / 4];
      if constexpr (GATED) {
#pragma unroll
        for (u32 i = 0; i < ROWS / 4; i++) {
          int row = first + (int)(lane / 8 + i * 4);
          sources[i] = nullptr;
          if (row < end) sources[i] = inputs + ((u64)(sorted_pairs[row] / top_k) * width + chunk * 8) * 2;
        }
      }
      const char* from = weights_of(walk.expert, first_unit);
      for (int j = 0; j < rounds; j++) {
        u32 tokens = ring + place.stage * STAGE_BYTES, arrived = ready + place.stage * 8;
        wait_for(empty + place.stage * 8, place.parity);
        __syncwarp();  // or lanes might fall behind by a lap, and mistake the barrier's phase
        if (lane == 0) {
          bool begun = ahead > 0 && is_right;
          if (ahead > 0 && !is_right) wait_for(guessed + place.stage * 8, 0);  // what has come is thrown away
          expect_bytes(arrived, (begun ? 0 : held * UNIT_BYTES) + (GATED ? 0 : TOKEN_BYTES));
          if (!begun) fetch_weights(from, held, j, place.stage, arrived);
          if constexpr (!GATED) {
            for (u32 slice = 0; slice < DEPTH / 64; slice++) {
              fetch(x_map, j * DEPTH + slice * 64, first, tokens + slice * SLICE_BYTES, arrived);
            }
          }
        }
        if constexpr (GATED) {
#pragma unroll
          for (u32 slice = 0; slice < DEPTH / 64; slice++) {
            int column = j * DEPTH + slice * 64;
#pragma unroll
            for (u32 i = 0; i < ROWS / 4; i++) {
              u32 row = lane / 8 + i * 4, to = tokens + slice * SLICE_BYTES + row * ROW_BYTES + (chunk ^ row % 8) * 16;
              if (sources[i]) copy_sixteen_or_zeros(to, sources[i] + column * 2, column + (int)chunk * 8 < width);
            }
          }
          arrive_behind_copies(arrived);
        }
        place.advance();
        ahead--;
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
    experts_product(const __grid_constant__ TensorMap x_map, const char* inputs, const char* weights,
                    const float* factors, const unsigned short* bias, char* out, const int* sorted_pairs,
                    const int* starts, int outputs, int units, int rounds, int width, int out_tiles, int top_k,
                    int guesses) {
  extern __shared__ char shared[];
  __shared__ u64 barriers[3 * STAGES];
  __shared__ int own_starts[EXPERTS + 1];
  u32 ring = (shared_address(shared) + 1023) / 1024 * 1024;
  u32 ready = shared_address(barriers), empty = ready + STAGES * 8, guessed = empty + STAGES * 8;
  Producer producer{&x_map, inputs, weights, sorted_pairs, ring, ready, empty, guessed, units, rounds, width, top_k};
  int guessed_expert = blockIdx.x / out_tiles, guessed_unit = blockIdx.x % out_tiles * TILE_UNITS;
  int ahead = guesses && guessed_expert < EXPERTS ? min(rounds, (int)STAGES) : 0;
  if (threadIdx.x == 0) {
    for (u32 stage = 0; stage < STAGES; stage++) {
      init_barrier(ready + stage * 8, GATED ? 33 : 1);  // who expects weights, and the lanes that copy rows
      init_barrier(empty + stage * 8, CONSUMER_WARPS);
      init_barrier(guessed + stage * 8, 1);
    }
    publish_barriers();
    if (ahead) producer.guess(guessed_expert, guessed_unit);
  }
  // The trigger comes after the wait: what starts then may read `starts`, as this very kernel does below.
  wait_for_kernel_ahead();
  let_next_kernel_start();
  for (u32 i = threadIdx.x; i <= EXPERTS; i += blockDim.x) own_starts[i] = starts[i];
  __syncthreads();
  Walk walk{own_starts, 0, (int)blockIdx.x, out_tiles};
  bool is_right = walk.settle() && walk.expert == guessed_expert && walk.first_unit() == guessed_unit;
  if (threadIdx.x < 128) {
    give_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x < 32) producer.run(walk, ahead, is_right);
    // A guess that came to nothing: a program must not end while its shared memory is written to.
    if (threadIdx.x == 0 && walk.expert == EXPERTS) {
      for (int j = 0; j < ahead; j++) wait_for(guessed + j * 8, 0);
    }
    return;
  }
  take_registers<CONSUMER_REGISTERS>();
  u32 group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128;
  float sums[UNITS][ROWS / 2];
  Place place{0, 0};
  bool follows_guess = is_right && ahead > 0;
  for (; walk.settle(); walk.own += gridDim.x) {
    multiply_tile(sums, ring, empty, place, rounds, group, thread, [&](const Place& at, int j) {
      if (follows_guess && j < ahead) wait_for(guessed + at.stage * 8, 0);
      wait_for(ready + at.stage * 8, at.parity);
      if constexpr (GATED) show_to_engines();  // rows were written by threads, and are read by tensor cores
    });
    follows_guess = false;
    int first = walk.first_row();
    const float* own_factors = HAS_FACTORS ? factors + (u64)walk.expert * units * 64 : nullptr;
    const unsigned short* own_bias = BIAS ? bias + (u64)walk.expert * outputs * (GATED ? 2 : 1) : nullptr;
#pragma unroll
    for (u32 i = 0; i < UNITS; i++) {
      u32 unit = walk.first_unit() + group * UNITS + i;
      if (unit >= units) break;
      unsigned short* to = (unsigned short*)out + (u64)first * outputs;
      store_unit(sums[i], own_factors, own_bias, to, unit, outputs, walk.end() - first, thread, group);
    }
  }
}
