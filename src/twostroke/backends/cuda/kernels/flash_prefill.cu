// Causal attention of prompts over paged keys. A program takes tiles of queries one after another, the longest first,
// off a common counter. Its producer warp keeps rings of keys and values full by TMA, from one tile into the next; warp
// groups of 64 query rows each multiply (wgmma) and weigh. Within a warp group the scores of a block of keys and the
// values of the block before are multiplied at once, and its softmax runs beside the latter; the warp groups take turns,
// so that it also runs beside the products of the others. Constants in capitals come with the compilation:
//   HEAD_DIM     64, 128 or 256                     QUERY_HEADS     query heads of a KV head
//   KEYS         of a block, a multiple of 64       KV_HEADS, PAGE  as the cache has them
//   WARP_GROUPS  two of a program that has a multiprocessor to itself, one where two programs share it
//   WINDOWED     whether a query reads only the newest `window` keys
//   SOFTCAPPED   whether scores pass through a tanh: of `cap_factor` times a score, `factor` times its value
//   SINKS        whether a score of each head, without a value, is weighed with those of the keys
// `multiply_keys` and `multiply_values`, wgmma with sums as operands, are written out by the caller of the compiler.

constexpr float SLACK = 8;  // how far, in powers of two, a peak may be passed before sums are brought to the new one
constexpr bool TAKE_TURNS = WARP_GROUPS > 1;

// What the launch says of scores.
struct Scoring {
  float factor, cap_factor;
  int window;
  const float* sinks;  // [heads]

  // What a head's sink adds to a sum of weights against this peak.
  __device__ __forceinline__ float weight_of_sink(u32 head, float peak) const {
    constexpr float LOG2_OF_E = 1.4426950408889634f;
    return SINKS ? power_of_two(fmaf(sinks[head], LOG2_OF_E, -peak)) : 0.0f;
  }

  // tanh, by way of powers of two: right at both infinities.
  __device__ __forceinline__ float capped(float score) const {
    return 1.0f - __fdividef(2.0f, power_of_two(score * cap_factor) + 1.0f);
  }

  // Whether a row reads a key that lies so far from the last that it reads.
  __device__ __forceinline__ bool reads(int limit, int key) const {
    return WINDOWED ? (u32)(limit - key) < (u32)window : key <= limit;
  }
};

// Turns a block's scores into weights against the peaks; `limit` is the last key of the block that a row reads, less
// the thread's first. Says whether peaks have moved, by the decay of what was summed up before.
template <bool MASKED>
__device__ __forceinline__ bool weigh(float (&scores)[KEYS / 2], const int (&limit)[2], const Scoring& scoring,
                                      float (&peak)[2], float (&total)[2], float (&decay)[2]) {
  constexpr int COLUMNS = KEYS / 4;  // of a thread: pairs, eight keys apart
  auto score = [&](int half, int n) -> float& { return scores[n / 2 * 4 + half * 2 + n % 2]; };
  const float MASKED_SCORE = __int_as_float(0xFF800000);  // minus infinity
  float now[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float highest[4];  // four at a time: a maximum waits for the one before
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
      if constexpr (SOFTCAPPED) score(half, n) = scoring.capped(score(half, n));
      if constexpr (MASKED) {
        score(half, n) = scoring.reads(limit[half], n / 2 * 8 + n % 2) ? score(half, n) : MASKED_SCORE;
      }
      highest[n % 4] = n < 4 ? score(half, n) : fmaxf(highest[n % 4], score(half, n));
    }
    float high = fmaxf(fmaxf(highest[0], highest[1]), fmaxf(highest[2], highest[3]));
    high = fmaxf(high, __shfl_xor_sync(ALL, high, 1));
    high = fmaxf(high, __shfl_xor_sync(ALL, high, 2));
    now[half] = fmaxf(peak[half], high * scoring.factor);
  }
  bool moved = __any_sync(ALL, now[0] > peak[0] + SLACK || now[1] > peak[1] + SLACK);
  if (moved) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      decay[half] = power_of_two(peak[half] - now[half]);
      total[half] *= decay[half];
      peak[half] = now[half];
    }
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float sum[4];
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
      score(half, n) = power_of_two(fmaf(score(half, n), scoring.factor, -peak[half]));
      sum[n % 4] = n < 4 ? score(half, n) : sum[n % 4] + score(half, n);
    }
    total[half] += (sum[0] + sum[1]) + (sum[2] + sum[3]);
  }
  return moved;
}

// What a thread of a warp group knows of its tile: parts of two rows.
struct Tile {
  Work work;
  Walk walk;
  float sums[HEAD_DIM / 2], scores[KEYS / 2], peak[2] = {LOWEST, LOWEST}, total[2] = {}, decay[2];
  u32 weights[KEYS / 4];

  __device__ __forceinline__ Tile(const Work& work, int window)
      : work(work), walk(work.tokens, work.base, work.part, work.parts, window) {
#pragma unroll
    for (u32 i = 0; i < HEAD_DIM / 2; i++) sums[i] = 0.0f;
  }

  // The sums of sixteen columns lie in a thread's registers as an operand of that depth has to.
  __device__ __forceinline__ void pack_weights() {
#pragma unroll
    for (u32 i = 0; i < KEYS / 4; i++) weights[i] = packed(scores[2 * i], scores[2 * i + 1]);
  }
};

struct Consumer {
  u32 group, thread, lane;
  const Places& at;

  __device__ __forceinline__ Consumer(const Places& at)
      : group(same_in_warp(threadIdx.x / 128 - 1)), thread(threadIdx.x % 128), lane(threadIdx.x % 32), at(at) {}

  __device__ __forceinline__ u32 row(u32 half) const { return group * 64 + thread / 32 * 16 + half * 8 + lane / 4; }

  __device__ __forceinline__ void release(u32 barrier) const {
    if (lane == 0) arrive(barrier);
  }

  __device__ __forceinline__ void await_turn() const { meet<256>(1 + group); }
  __device__ __forceinline__ void pass_turn() const { call<256>(1 + (group + 1) % WARP_GROUPS); }

  __device__ __forceinline__ void begin_scores(float (&scores)[KEYS / 2], u32 stage) const {
    u64 keys = matrix_at(at.keys + stage * BLOCK_BYTES);
    u64 queries = matrix_at(at.queries + group * 64 * ROW_BYTES);
    begin_products();
#pragma unroll
    for (u32 k = 0; k < HEAD_DIM / 16; k++) {
      u32 within = k % 4 * 2;  // of a row, in units of sixteen bytes
      multiply_keys(scores, queries + k / 4 * (QUERY_SLICE >> 4) + within, keys + k / 4 * (KEY_SLICE >> 4) + within,
                    k > 0);
    }
    end_products();
  }

  __device__ __forceinline__ void begin_values(float (&sums)[HEAD_DIM / 2], const u32 (&weights)[KEYS / 4],
                                               u32 stage) const {
    u64 values = matrix_at(at.values + stage * BLOCK_BYTES, KEY_SLICE);
    begin_products();
#pragma unroll
    for (u32 k = 0; k < KEYS / 16; k++) {
      multiply_values(sums, weights + k * 4, values + k * (16 * ROW_BYTES >> 4), 1);
    }
    end_products();
  }

  __device__ __forceinline__ void clear_rows(u32 stage, int begin, int end) const {
    u32 pieces = (end - begin) * (ROW_BYTES / 16);
#pragma unroll
    for (u32 slice = 0; slice < SLICES; slice++) {
      u32 first = at.values + stage * BLOCK_BYTES + slice * KEY_SLICE + begin * ROW_BYTES;
      for (u32 piece = thread; piece < pieces; piece += 128) {
        clear_sixteen(first + piece * 16);
      }
    }
  }

  // Values behind the context are nobody's, and zero weight times NaN would be NaN; where the window begins in the same
  // block, they may stand for spans before it as well. Each warp group does it for itself.
  __device__ __forceinline__ void clear_values(const Tile& tile, u32 stage, int filled, int window) const {
    clear_rows(stage, filled, KEYS);
    if constexpr (WINDOWED) {
      int first = oldest_key(tile.work.base, window) / (int)SPAN * (int)SPAN - tile.walk.top * (int)KEYS;
      clear_rows(stage, 0, max(first, 0));
    }
    show_to_engines();
    meet<128>(1 + WARP_GROUPS + group);
  }

  // One row of means: to the result, or to the scratch where a tile's parts are joined.
  __device__ __forceinline__ void store(const Tile& tile, u32 half, char* out, float* partials, float* log_sums,
                                        const Scoring& scoring) const {
    const Work& work = tile.work;
    float total = tile.total[half];
    total += __shfl_xor_sync(ALL, total, 1);
    total += __shfl_xor_sync(ALL, total, 2);
    bool held = row(half) < work.tokens * QUERY_HEADS;
    u32 head = work.kv_head * QUERY_HEADS + row(half) % QUERY_HEADS;
    float sink = work.parts == 1 ? scoring.weight_of_sink(head, tile.peak[half]) : 0.0f;  // else where parts are joined
    float share = total == 0.0f ? 0.0f : 1.0f / (total + sink);
    auto mean = [&](int block, int place) { return tile.sums[block * 4 + half * 2 + place] * share; };
    if (work.parts == 1) {
      u64 token = work.first_token + row(half) / QUERY_HEADS;
      char* to = out + (token * (KV_HEADS * QUERY_HEADS) + head) * HEAD_DIM * 2;
#pragma unroll
      for (int block = 0; block < HEAD_DIM / 8; block += 4) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) words[i] = packed(mean(block + i, 0), mean(block + i, 1));
        exchange(words, lane);
        if (held) *(uint4*)(to + (block + lane % 4) * 16) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    } else {
      u64 slot = ((u64)work.place * KV_HEADS + work.kv_head) * TILE + row(half);
      float* to = partials + slot * HEAD_DIM + lane % 4 * 2;
#pragma unroll
      for (int block = 0; block < HEAD_DIM / 8; block++) {
        if (held) *(float2*)(to + block * 8) = make_float2(mean(block, 0), mean(block, 1));
      }
      if (lane % 4 == 0) log_sums[slot] = tile.peak[half] + log2f(total);
    }
  }

  __device__ __forceinline__ void keys_read(const Tile& tile, int j, u32 stage) const {
    release(at.keys_free + stage * 8);
    if (j == tile.walk.rounds - 1) release(at.queries_free);
  }

  template <bool MASKED>
  __device__ __forceinline__ bool weigh_block(Tile& tile, int j, const Scoring& scoring) const {
    int limit[2];
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
      int position = tile.work.base + (int)(row(half) / QUERY_HEADS);
      limit[half] = position - (tile.walk.top - j) * (int)KEYS - (int)(lane % 4 * 2);
    }
    return weigh<MASKED>(tile.scores, limit, scoring, tile.peak, tile.total, tile.decay);
  }

  // Block 0, whose scores have nothing to run beside. `number` is a block's among those of all tiles.
  __device__ __forceinline__ void first_round(Tile& tile, u32 number, const Scoring& scoring) const {
    u32 stage = number % STAGES, parity = number / STAGES & 1;
    wait_for(at.keys_ready + stage * 8, parity);
    begin_scores(tile.scores, stage);
    int filled = tile.work.context - tile.walk.top * (int)KEYS;
    if (filled < (int)KEYS) {
      wait_for(at.values_ready + stage * 8, parity);
      clear_values(tile, stage, filled, scoring.window);
    }
    wait_for_products<0>(tile.scores);
    keys_read(tile, 0, stage);
    weigh_block<true>(tile, 0, scoring);
    tile.pack_weights();
  }

  // The scores of block j beside the values of block j - 1.
  template <bool MASKED>
  __device__ __forceinline__ void round(Tile& tile, int j, u32 number, const Scoring& scoring) const {
    u32 stage = number % STAGES, parity = number / STAGES & 1;
    u32 stage_before = (number - 1) % STAGES, parity_before = (number - 1) / STAGES & 1;
    wait_for(at.keys_ready + stage * 8, parity);
    if constexpr (TAKE_TURNS) await_turn();
    begin_scores(tile.scores, stage);
    wait_for(at.values_ready + stage_before * 8, parity_before);
    begin_values(tile.sums, tile.weights, stage_before);
    if constexpr (TAKE_TURNS) pass_turn();
    wait_for_products<1>(tile.scores);
    keys_read(tile, j, stage);
    bool moved = weigh_block<MASKED>(tile, j, scoring);
    wait_for_products<0>(tile.sums);
    release(at.values_free + stage_before * 8);
    if (moved) {
#pragma unroll
      for (u32 i = 0; i < HEAD_DIM / 2; i++) tile.sums[i] *= tile.decay[i / 2 % 2];
    }
    tile.pack_weights();
  }

  __device__ __forceinline__ void last_values(Tile& tile, u32 number) const {
    u32 stage = number % STAGES, parity = number / STAGES & 1;
    wait_for(at.values_ready + stage * 8, parity);
    begin_values(tile.sums, tile.weights, stage);
    wait_for_products<0>(tile.sums);
    release(at.values_free + stage * 8);
  }

  __device__ __forceinline__ void walk(Tile& tile, u32 done, const Scoring& scoring) const {
    first_round(tile, done, scoring);
    int j = 1;
    if constexpr (WINDOWED) {
      for (; j < tile.walk.rounds; j++) {
        if (j < tile.walk.masked || j >= tile.walk.edge) {
          round<true>(tile, j, done + j, scoring);
        } else {
          round<false>(tile, j, done + j, scoring);
        }
      }
    } else {
      for (; j < min(tile.walk.masked, tile.walk.rounds); j++) round<true>(tile, j, done + j, scoring);
      for (; j < tile.walk.rounds; j++) round<false>(tile, j, done + j, scoring);
    }
    last_values(tile, done + tile.walk.rounds - 1);
  }

  __device__ __forceinline__ void run(const Work* told, char* out, float* partials, float* log_sums,
                                      const Scoring& scoring) const {
    u32 done = 0;  // blocks so far, of all tiles
    if (TAKE_TURNS && group == WARP_GROUPS - 1) pass_turn();
    for (u32 number = 0;; number++) {
      wait_for(at.queries_ready, number & 1);
      Tile tile(*told, scoring.window);
      if (tile.work.tokens == 0) break;
      if (!WINDOWED || tile.walk.rounds > 0) {
        walk(tile, done, scoring);
        done += tile.walk.rounds;
      } else {
        __syncwarp();
        release(at.queries_free);
      }
#pragma unroll
      for (u32 half = 0; half < 2; half++) store(tile, half, out, partials, log_sums, scoring);
    }
    if (TAKE_TURNS && group == 0) await_turn();  // the turn that the last round passed on
  }
};

// Rows that no query fills: a row's peak moves the sums of its warp, and so the last bits of the rows beside it.
__device__ __forceinline__ void clear_idle_rows(const Places& at) {
  if constexpr (FILLED_ROWS < TILE) {
    constexpr u32 PIECES = (TILE - FILLED_ROWS) * (ROW_BYTES / 16);
    for (u32 piece = threadIdx.x; piece < PIECES * SLICES; piece += 128 * (WARP_GROUPS + 1)) {
      u32 first = at.queries + piece / PIECES * QUERY_SLICE + FILLED_ROWS * ROW_BYTES;
      clear_sixteen(first + piece % PIECES * 16);
    }
    show_to_engines();
  }
}

extern "C" __global__ void __launch_bounds__(128 * (WARP_GROUPS + 1), PROGRAMS_PER_SM)
    attend(const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
           const __grid_constant__ TensorMap value_map, const int* table, const int* items, char* out, float* partials,
           float* log_sums, int* claims, const float* sinks, long long table_stride, int units, int heads_at_once,
           float factor, float cap_factor, int window) {
  extern __shared__ char memory[];
  __shared__ u64 barriers[BARRIERS];
  __shared__ Work work;
  Places at(memory, barriers);
  if (threadIdx.x == 0) {
    init_barrier(at.queries_ready, 1);
    init_barrier(at.queries_free, CONSUMER_WARPS);
    for (u32 stage = 0; stage < STAGES; stage++) {
      init_barrier(at.keys_ready + stage * 8, 1);
      init_barrier(at.keys_free + stage * 8, CONSUMER_WARPS);
      init_barrier(at.values_ready + stage * 8, 1);
      init_barrier(at.values_free + stage * 8, CONSUMER_WARPS);
    }
    publish_barriers();
  }
  clear_idle_rows(at);
  __syncthreads();
  if (threadIdx.x < 128) {
    give_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x < 32) {
      Producer producer{&query_map,   &key_map, &value_map,    table,      items, claims,
                        table_stride, units,    heads_at_once, window,     threadIdx.x};
      producer.run(at, &work);
    }
  } else {
    take_registers<CONSUMER_REGISTERS>();
    Consumer(at).run(&work, out, partials, log_sums, Scoring{factor, cap_factor, window, sinks});
  }
}
