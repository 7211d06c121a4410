// out = x @ weight^T, perhaps gated, in clusters: the programs of a cluster compute neighbouring outputs of the same
// rows, and each fetches a share of those rows for all of them. A producer thread keeps a ring of TMA copies full; warp
// groups multiply from it (wgmma) and keep their sums in registers. Constants in capitals come with the compilation:
//   ROW_BLOCKS  blocks of 64 rows that a warp group multiplies     GROUPS   warp groups that multiply
//   OUTPUTS     outputs of a program; gated: half gate, half up    CLUSTER  programs that share rows
//   PIECES      instructions that a program's outputs take
//   STAGES      length of the ring                                 BAND     row tiles that are walked together
//   GATED       0 no, 1 SiLU, 2 GELU (tanh)                        FLOAT32  whether sums are stored as they are
//   BFLOAT16    whether elements are bfloat16, or float16          DEPENDENT  whether the launch is a dependent one
// Behind hopper_primitives.cuh and `multiply`, a wgmma instruction for OUTPUTS / PIECES outputs (wgmma.py).

constexpr u32 DEPTH = 64;  // inputs a round: 128 bytes, the widest row that is spread over shared memory's banks
constexpr u32 ROW_BYTES = DEPTH * 2;
constexpr u32 ROWS = 64 * ROW_BLOCKS * GROUPS;
constexpr u32 STAGE_BYTES = (ROWS + OUTPUTS) * ROW_BYTES;
constexpr u32 SHARE = ROWS / CLUSTER;  // rows that one program fetches for its cluster
constexpr u32 COLUMNS = GATED ? OUTPUTS / 2 : OUTPUTS;  // of the result
// Together no more than what a launch hands out: 168, 128 or 96 a thread. A warp group waits for ever for more.
constexpr u32 PRODUCER_REGISTERS = GROUPS == 2 ? 24 : 32;
constexpr u32 CONSUMER_REGISTERS = GROUPS == 2 ? 240 : GROUPS == 3 ? 160 : 112;

// Tells a program of the cluster that this warp group has read a stage.
__device__ __forceinline__ void release_to(u32 barrier, u32 program) {
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
      " mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier), "r"(program)
      : "memory");
}

// To the same place in every program of the cluster; each one's own barrier counts the bytes.
__device__ __forceinline__ void fetch_for_all(const TensorMap* map, int column, int row, u32 to, u32 ready) {
  if constexpr (CLUSTER == 1) {
    fetch(map, column, row, to, ready);
  } else {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(ready), "h"((unsigned short)((1 << CLUSTER) - 1))
        : "memory");
  }
}

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");  // a release would flush all memory
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ float gated(float gate, float up) {
  // gelu's 0.5 * (1 + tanh(z)) is sigmoid(2z): one exponential, and no overflow
  float inner = GATED == 2 ? 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate) : gate;
  return gate * __fdividef(1.0f, 1.0f + __expf(-inner)) * up;
}

// Where the tile of a cluster lies. Row tiles are walked in bands, so that a band's rows and the weights in use stay in
// the cache together.
struct Tile {
  int row_tile, out_cluster, split;
  __device__ Tile(int index, int row_tiles, int out_clusters) {
    int tiles = row_tiles * out_clusters;
    split = index / tiles;
    index -= split * tiles;
    int band = index / (BAND * out_clusters);
    int height = min(BAND, row_tiles - band * BAND);
    index -= band * BAND * out_clusters;
    out_cluster = index / height;
    row_tile = band * BAND + index % height;
  }
};

// What the producer, one thread, does: weights come for this program alone, rows for its cluster.
struct Producer {
  const TensorMap *x_map, *w_map;
  u32 ring, ready, empty, own;
  int outputs, rounds, row_tiles, out_clusters, tiles;

  __device__ __forceinline__ void fetch_weights(const Tile& tile, int j, u32 stage) {
    u32 to = ring + stage * STAGE_BYTES + ROWS * ROW_BYTES, arrived = ready + stage * 8;
    int output = (tile.out_cluster * CLUSTER + own) * COLUMNS, column = (tile.split * rounds + j) * DEPTH;
    expect_bytes(arrived, STAGE_BYTES);
    fetch(w_map, column, output, to, arrived);
    if constexpr (GATED) fetch(w_map, column, outputs + output, to + COLUMNS * ROW_BYTES, arrived);
  }

  __device__ __forceinline__ void fetch_rows(const Tile& tile, int j, u32 stage) {
    u32 to = ring + stage * STAGE_BYTES + own * SHARE * ROW_BYTES;
    int row = tile.row_tile * ROWS + own * SHARE, column = (tile.split * rounds + j) * DEPTH;
    fetch_for_all(x_map, column, row, to, ready + stage * 8);
  }

  // Weights never change, so the ring is full of them before the kernel ahead has ended.
  __device__ __forceinline__ void begin(int first) {
    Tile tile(first, row_tiles, out_clusters);
    for (int j = 0; j < min(rounds, (int)STAGES); j++) fetch_weights(tile, j, j);
    if constexpr (DEPENDENT) {
      asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
      asm volatile("griddepcontrol.wait;" ::: "memory");
    }
  }

  __device__ __forceinline__ void go_on(int first) {
    u32 stage = 0, parity = 1;  // of the lap before: the first one's stages are free
    for (int index = first; index < tiles; index += gridDim.x / CLUSTER) {
      Tile tile(index, row_tiles, out_clusters);
      for (int j = 0; j < rounds; j++) {
        bool begun = index == first && j < STAGES;
        if (!begun) {
          wait_for(empty + stage * 8, parity);
          fetch_weights(tile, j, stage);
        }
        fetch_rows(tile, j, stage);
        if (++stage == STAGES) {
          stage = 0;
          parity ^= 1;
        }
      }
    }
  }
};

// One row's results of a thread: `half` 0 is its upper row, 1 the one eight below.
__device__ __forceinline__ void store_row(const float (&sums)[PIECES][OUTPUTS / PIECES / 2], int half, char* row, int first_output,
                                          int outputs, bool held, u32 lane) {
  constexpr u32 ELEMENT_BYTES = FLOAT32 ? 4 : 2;
  constexpr int BLOCKS = COLUMNS / 8, PIECE_BLOCKS = OUTPUTS / PIECES / 8;
  auto value = [&](int block, int place) {
    auto sum = [&](int at) { return sums[at / PIECE_BLOCKS][at % PIECE_BLOCKS * 4 + half * 2 + place]; };
    if constexpr (GATED) return gated(sum(block), sum(block + BLOCKS));
    return sum(block);
  };
  if constexpr (FLOAT32) {
#pragma unroll
    for (int block = 0; block < BLOCKS; block++) {
      int column = first_output + block * 8 + (lane % 4) * 2;
      if (held && column < outputs) {
        *(float2*)(row + (u64)column * ELEMENT_BYTES) = make_float2(value(block, 0), value(block, 1));
      }
    }
  } else {
#pragma unroll
    for (int block = 0; block + 4 <= BLOCKS; block += 4) {
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; i++) words[i] = packed(value(block + i, 0), value(block + i, 1));
      exchange(words, lane);
      int column = first_output + (block + lane % 4) * 8;
      if (held && column < outputs) {
        *(uint4*)(row + (u64)column * ELEMENT_BYTES) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
#pragma unroll
    for (int block = BLOCKS / 4 * 4; block < BLOCKS; block++) {
      int column = first_output + block * 8 + (lane % 4) * 2;
      if (held && column < outputs) {
        *(u32*)(row + (u64)column * ELEMENT_BYTES) = packed(value(block, 0), value(block, 1));
      }
    }
  }
}

__device__ __forceinline__ void consume(u32 group, u32 ring, u32 ready, u32 empty, u32 own, char* out, int num_rows,
                                        int outputs, int rounds, int row_tiles, int out_clusters, int tiles) {
  constexpr u32 ELEMENT_BYTES = FLOAT32 ? 4 : 2;
  u32 thread = threadIdx.x % 128, lane = thread % 32;
  u32 stage = 0, parity = 0;
  float sums[ROW_BLOCKS][PIECES][OUTPUTS / PIECES / 2];
  auto release = [&](u32 read) {
    if (thread < CLUSTER) release_to(empty + read * 8, thread);
  };
  for (int index = blockIdx.x / CLUSTER; index < tiles; index += gridDim.x / CLUSTER) {
    Tile tile(index, row_tiles, out_clusters);
    u32 before = 0;
    for (int j = 0; j < rounds; j++) {
      wait_for(ready + stage * 8, parity);
      u64 rows = matrix_at(ring + stage * STAGE_BYTES + group * ROW_BLOCKS * 64 * ROW_BYTES);
      u64 weights = matrix_at(ring + stage * STAGE_BYTES + ROWS * ROW_BYTES);
      begin_products();
#pragma unroll
      for (u32 k = 0; k < DEPTH / 16; k++) {
#pragma unroll
        for (u32 block = 0; block < ROW_BLOCKS; block++) {
#pragma unroll
          for (u32 piece = 0; piece < PIECES; piece++) {
            u64 own_rows = rows + block * (64 * ROW_BYTES >> 4) + k * 2;
            u64 own_weights = weights + piece * (OUTPUTS / PIECES * ROW_BYTES >> 4) + k * 2;
            multiply(sums[block][piece], own_rows, own_weights, j > 0 || k > 0);
          }
        }
      }
      end_products();
      if (j > 0) {
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        release(before);
      }
      before = stage;
      if (++stage == STAGES) {
        stage = 0;
        parity ^= 1;
      }
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    release(before);
    int first_output = (tile.out_cluster * CLUSTER + own) * COLUMNS;
#pragma unroll
    for (u32 block = 0; block < ROW_BLOCKS; block++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        int row = tile.row_tile * ROWS + (group * ROW_BLOCKS + block) * 64 + thread / 32 * 16 + half * 8 + lane / 4;
        char* at = out + ((u64)tile.split * num_rows + row) * outputs * ELEMENT_BYTES;
        store_row(sums[block], half, at, first_output, outputs, row < num_rows, lane);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
    product(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, char* out, int num_rows,
            int outputs, int rounds, int row_tiles, int out_clusters, int tiles) {
  extern __shared__ char shared[];
  __shared__ u64 barriers[2 * STAGES];
  u32 ring = (shared_address(shared) + 1023) / 1024 * 1024;
  u32 ready = shared_address(barriers), empty = ready + STAGES * 8;
  u32 own;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(own));
  if (threadIdx.x == 0) {
    for (u32 stage = 0; stage < STAGES; stage++) {
      init_barrier(ready + stage * 8, 1);
      init_barrier(empty + stage * 8, GROUPS * CLUSTER);
    }
    publish_barriers();
  }
  __syncthreads();
  cluster_arrive();
  int first = blockIdx.x / CLUSTER;
  if (threadIdx.x < 128) {
    give_registers<PRODUCER_REGISTERS>();
    Producer producer{&x_map, &w_map, ring, ready, empty, own, outputs, rounds, row_tiles, out_clusters, tiles};
    if (threadIdx.x == 0) producer.begin(first);
    __syncwarp();
    cluster_wait();  // until then another program's barriers may not be set up
    if (threadIdx.x == 0) producer.go_on(first);
    __syncwarp();
  } else {
    take_registers<CONSUMER_REGISTERS>();
    cluster_wait();
    consume(threadIdx.x / 128 - 1, ring, ready, empty, own, out, num_rows, outputs, rounds, row_tiles, out_clusters,
            tiles);
  }
  // A program that others of its cluster may still write to must not end.
  cluster_arrive();
  cluster_wait();
}
