// What the warps of flash_prefill.cu agree on: the places in shared memory, the blocks of keys that a tile walks, and the
// producer warp, which fetches them for the others.

constexpr u32 ROW_BYTES = 128;  // of 64 elements: the widest row that is spread over shared memory's banks
constexpr u32 SPAN = 64;        // keys that one copy fetches: they never lie in two pages
constexpr u32 SPANS = KEYS / SPAN;
constexpr u32 SLICES = HEAD_DIM / 64;
constexpr u32 TILE = 64 * WARP_GROUPS;
constexpr u32 QUERY_SLICE = TILE * ROW_BYTES, KEY_SLICE = KEYS * ROW_BYTES;
constexpr u32 FILLED_ROWS = TILE / QUERY_HEADS * QUERY_HEADS;  // of a tile, by whole groups of heads
constexpr u32 FETCHED_QUERY_BYTES = FILLED_ROWS * ROW_BYTES * SLICES;
constexpr u32 BLOCK_BYTES = KEY_SLICE * SLICES;
constexpr u32 STAGES = 2;
constexpr u32 BATCH = 32 / SPANS;  // blocks whose pages the lanes of the producer hold
constexpr u32 ALL = 0xFFFFFFFF;
constexpr u32 CONSUMER_WARPS = 4 * WARP_GROUPS;
constexpr u32 PROGRAMS_PER_SM = WARP_GROUPS == 2 ? 1 : 2;
// Together no more than what a launch hands out: 168 or 128 a thread. A warp group waits for ever for more.
constexpr u32 PRODUCER_REGISTERS = 24;
constexpr u32 CONSUMER_REGISTERS = WARP_GROUPS == 2 ? 240 : 232;
constexpr float LOWEST = -1.0e30f;  // the peak of a query that has seen no key yet: finite, so that nothing is NaN

enum Field { ROW, FIRST_TOKEN, TOKENS, BASE, CONTEXT, PART, PARTS, PLACE, FIELDS };

// What the producer tells the others with a tile's queries; no tokens: there is no further tile.
struct alignas(16) Work {
  int kv_head, first_token, tokens, base, context, part, parts, place;
};

// Where things lie in shared memory.
struct Places {
  u32 queries, keys, values;
  u32 queries_ready, queries_free, keys_ready, keys_free, values_ready, values_free;
  __device__ Places(const void* memory, const u64* barriers) {
    queries = (shared_address(memory) + 1023) / 1024 * 1024;
    keys = queries + QUERY_SLICE * SLICES;
    values = keys + STAGES * BLOCK_BYTES;
    queries_ready = shared_address(barriers);
    queries_free = queries_ready + 8;
    keys_ready = queries_ready + 16;
    keys_free = keys_ready + STAGES * 8;
    values_ready = keys_free + STAGES * 8;
    values_free = values_ready + STAGES * 8;
  }
};
constexpr u32 BARRIERS = 2 + 4 * STAGES;

// The first key that a query at this position reads.
__device__ __forceinline__ int oldest_key(int position, int window) {
  return WINDOWED ? max(position - window + 1, 0) : 0;
}

// The blocks of keys that a tile, or a part of it, reads: from `top` down, the diagonal first. The first `masked` ones,
// and with a window those from `edge` on, hold keys that not all queries may read. Tiles are cut as if there were no
// window, so with one a part may be left without a block.
struct Walk {
  int top, rounds, masked, edge;
  __device__ Walk(int tokens, int base, int part, int parts, int window) {
    int low = oldest_key(base, window) / (int)KEYS;
    int blocks = (base + tokens - 1) / KEYS + 1 - low;
    int begin = low + blocks * part / parts, end = low + blocks * (part + 1) / parts;
    top = end - 1;
    rounds = end - begin;
    masked = end - (base + 1) / (int)KEYS;
    edge = end - (oldest_key(base + tokens - 1, window) + (int)KEYS - 1) / (int)KEYS;
  }
};

struct Producer {
  const TensorMap *query_map, *key_map, *value_map;
  const int *table, *items;
  int* claims;
  long long table_stride;
  int units, heads_at_once, window;
  u32 lane;

  // Units are the items of some KV heads, the heads of one item together, then those of the next heads: as many at once
  // as have their keys and values in the second-level cache.
  __device__ __forceinline__ int item_of(int unit) const {
    return unit % (units / KV_HEADS * heads_at_once) / heads_at_once;
  }
  __device__ __forceinline__ int kv_head_of(int unit) const {
    int units_at_once = units / KV_HEADS * heads_at_once;
    return unit / units_at_once * heads_at_once + unit % units_at_once % heads_at_once;
  }

  // The next unit of work that nobody has: units after the first round of programs, in order. The last claim of all
  // leaves the counter as it was found.
  __device__ __forceinline__ int claim() const {
    int unit = 0;
    if (lane == 0) {
      int claimed = atomicAdd(claims, 1);
      if (claimed == units - 1) *claims = 0;
      unit = gridDim.x + claimed;
    }
    return __shfl_sync(ALL, unit, 0);
  }

  // A lane's share of an item: the field of its number.
  __device__ __forceinline__ int field_of(int unit) const {
    return unit < units ? items[item_of(unit) * FIELDS + lane % FIELDS] : 0;
  }

  __device__ __forceinline__ Walk walk_of(int fields) const {
    int tokens = __shfl_sync(ALL, fields, TOKENS), base = __shfl_sync(ALL, fields, BASE);
    int part = __shfl_sync(ALL, fields, PART), parts = max(__shfl_sync(ALL, fields, PARTS), 1);
    return Walk(tokens, base, part, parts, window);
  }

  // Rows of the cache, seen as [pages * kv_heads * page size, head_dim], where the spans of BATCH blocks from `block`
  // down begin: a lane for each, from the last one down. Spans behind the context, and those that lie before a window,
  // may have no page: the nearest that has one stands for them.
  __device__ __forceinline__ int row_of_span(int kv_head, int fields, int block) const {
    int first = WINDOWED ? oldest_key(__shfl_sync(ALL, fields, BASE), window) / (int)SPAN : 0;
    int last = (__shfl_sync(ALL, fields, CONTEXT) - 1) / (int)SPAN;
    int table_row = __shfl_sync(ALL, fields, ROW);
    int key = max(min((block + 1) * (int)SPANS - 1 - (int)lane, last), first) * (int)SPAN;
    int page = table[table_row * table_stride + key / PAGE];
    return (page * KV_HEADS + kv_head) * PAGE + key % PAGE;
  }

  // One block, by lane 0.
  __device__ __forceinline__ void fetch_block(const TensorMap* map, const int (&rows)[SPANS], u32 to, u32 ready) const {
    expect_bytes(ready, BLOCK_BYTES);
#pragma unroll
    for (u32 slice = 0; slice < SLICES; slice++) {
#pragma unroll
      for (u32 span = 0; span < SPANS; span++) {
        fetch(map, slice * 64, rows[span], to + slice * KEY_SLICE + span * SPAN * ROW_BYTES, ready);
      }
    }
  }

  __device__ __forceinline__ void fetch_queries(const Places& at, Work* work, int unit, int fields, u32 tile) const {
    Work told;
    told.kv_head = kv_head_of(unit);
    told.first_token = __shfl_sync(ALL, fields, FIRST_TOKEN);
    told.tokens = __shfl_sync(ALL, fields, TOKENS);
    told.base = __shfl_sync(ALL, fields, BASE);
    told.context = __shfl_sync(ALL, fields, CONTEXT);
    told.part = __shfl_sync(ALL, fields, PART);
    told.parts = __shfl_sync(ALL, fields, PARTS);
    told.place = __shfl_sync(ALL, fields, PLACE);
    wait_for(at.queries_free, (tile & 1) ^ 1);
    if (lane == 0) {
      *work = told;
      expect_bytes(at.queries_ready, FETCHED_QUERY_BYTES);
#pragma unroll
      for (u32 slice = 0; slice < SLICES; slice++) {
        fetch(query_map, slice * 64, told.kv_head * QUERY_HEADS, told.first_token, at.queries + slice * QUERY_SLICE,
              at.queries_ready);
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void run(const Places& at, Work* work) const {
    u32 done = 0, tile = 0;  // blocks and tiles so far
    int unit = blockIdx.x, fields = field_of(unit);
    int first_rows = row_of_span(kv_head_of(unit), fields, walk_of(fields).top);
    while (unit < units) {
      // The next tile is looked up a step a round, so that its start waits for no memory.
      int next_unit = 0, next_fields = 0, next_rows = 0;
      auto look_ahead = [&](int step) {
        if (step == 0) next_unit = claim();
        if (step == 1) next_fields = field_of(next_unit);
        if (step == 2) next_rows = row_of_span(kv_head_of(next_unit), next_fields, walk_of(next_fields).top);
      };
      int steps = 0;
      if (__shfl_sync(ALL, fields, TOKENS) > 0) {  // else it only fills up a captured graph
        Walk walk = walk_of(fields);
        int held = first_rows, following = 0;
        int rows[SPANS], rows_before[SPANS];
        for (int j = 0; j <= walk.rounds; j++) {
          if (j < walk.rounds) {
            if (j % BATCH == 0) {
              if (j > 0) held = following;
              following = row_of_span(kv_head_of(unit), fields, walk.top - j - (int)BATCH);
            }
            u32 stage = (done + j) % STAGES, lap = (done + j) / STAGES;
#pragma unroll
            for (u32 span = 0; span < SPANS; span++) {
              rows[span] = __shfl_sync(ALL, held, j % BATCH * SPANS + SPANS - 1 - span);
            }
            wait_for(at.keys_free + stage * 8, (lap & 1) ^ 1);
            if (lane == 0) fetch_block(key_map, rows, at.keys + stage * BLOCK_BYTES, at.keys_ready + stage * 8);
            __syncwarp();
          }
          if (j == 0) fetch_queries(at, work, unit, fields, tile);
          if (j > 0) {
            u32 stage = (done + j - 1) % STAGES, lap = (done + j - 1) / STAGES;
            wait_for(at.values_free + stage * 8, (lap & 1) ^ 1);
            if (lane == 0) {
              fetch_block(value_map, rows_before, at.values + stage * BLOCK_BYTES, at.values_ready + stage * 8);
            }
            __syncwarp();
          }
#pragma unroll
          for (u32 span = 0; span < SPANS; span++) rows_before[span] = rows[span];
          if (steps < 3) look_ahead(steps++);
        }
        done += walk.rounds;
        tile++;
      }
      while (steps < 3) look_ahead(steps++);
      unit = next_unit;
      fields = next_fields;
      first_rows = next_rows;
    }
    wait_for(at.queries_free, (tile & 1) ^ 1);
    if (lane == 0) {
      work->tokens = 0;
      arrive(at.queries_ready);
    }
  }
};
