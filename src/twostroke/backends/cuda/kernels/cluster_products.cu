// out = x @ weight^T, perhaps gated, in clusters. The programs of a cluster compute neighbouring outputs of the same
// rows, and each fetches a share of those rows for all of them; or they compute the same outputs, each over its part of
// the depth, and add them up among themselves (of several clusters that divide it, each leaves its sums to the reader).
// A producer thread keeps a ring of TMA copies full; warp groups multiply from it (wgmma) and keep their sums in
// registers. Constants in capitals come with the compilation:
//   ROW_BLOCKS  blocks of 64 rows that a warp group multiplies     GROUPS   warp groups that multiply
//   OUTPUTS     outputs of a program; gated: half gate, half up    CLUSTER  programs of a cluster
//   PIECES      instructions that a program's outputs take         SPLIT    whether they divide the depth
//   STAGES      length of the ring                                 BAND     row tiles that are walked together
//   GATED       0 no, 1 SiLU, 2 GELU (tanh)                        FLOAT32  whether sums are stored as they are
//   BFLOAT16    whether elements are bfloat16, or float16          COPIED   rows of a tile that are fetched: the sums
//                                                                           of others are dropped
// Behind hopper_primitives.cuh and `multiply`, a wgmma instruction for OUTPUTS / PIECES outputs (wgmma.py).

constexpr u32 DEPTH = 64;  // inputs a round: 128 bytes, the widest row that is spread over shared memory's banks
constexpr u32 ROW_BYTES = DEPTH * 2;
constexpr u32 ROWS = 64 * ROW_BLOCKS * GROUPS;
constexpr u32 STAGE_BYTES = (ROWS + OUTPUTS) * ROW_BYTES;
constexpr u32 SHARERS = SPLIT ? 1 : CLUSTER;  // programs that read the same rows
constexpr u32 SHARE = COPIED / SHARERS;  // rows that one program fetches for all of them
constexpr u32 COLUMNS = GATED ? OUTPUTS / 2 : OUTPUTS;  // of the result
// Together no more than what a launch hands out: 168, 128 or 96 a thread. A warp group waits for ever for more. Beside
// one group that multiplies there are enough for both.
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
  if constexpr (SHARERS == 1) {
    fetch(map, column, row, to, ready);
  } else {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(ready), "h"((unsigned short)((1 << SHARERS) - 1))
        : "memory");
  }
}

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");  // a release would flush all memory
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// As `cluster_arrive`, and what was written to shared memory before is seen by those who wait.
__device__ __forceinline__ void cluster_publish() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void store_two(u32 address, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(first), "f"(second) : "memory");
}

// From the same place in a program of the cluster.
__device__ __forceinline__ void add_four(float (&total)[4], u32 address, u32 program) {
  float found[4];
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %4, %5;"
      " ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there]; }"
      : "=f"(found[0]), "=f"(found[1]), "=f"(found[2]), "=f"(found[3])
      : "r"(address), "r"(program)
      : "memory");
#pragma unroll
  for (int i = 0; i < 4; i++) total[i] += found[i];
}

// Where the tile of a program lies. Row tiles are walked in bands, so that a band's rows and the weights in use stay in
// the cache together.
struct Tile {
  int first_row, first_output, first_column;
  __device__ Tile(int index, u32 own, int row_tiles, int out_blocks, int rounds) {
    int part = index / (row_tiles * out_blocks);  // of a depth that several clusters divide
    index -= part * row_tiles * out_blocks;
    int band = index / (BAND * out_blocks);
    int height = min(BAND, row_tiles - band * BAND);
    index -= band * BAND * out_blocks;
    first_row = (band * BAND + index % height) * ROWS;
    first_output = (index / height * SHARERS + (SPLIT ? 0 : own)) * COLUMNS;
    first_column = SPLIT ? (part * CLUSTER + own) * rounds * DEPTH : 0;
  }
};

// What the producer, one thread, does: weights come for this program alone, rows for its cluster.
struct Producer {
  const TensorMap *x_map, *w_map;
  u32 ring, ready, empty, own;
  int outputs, rounds, row_tiles, out_blocks, tiles;

  __device__ __forceinline__ void fetch_weights(const Tile& tile, int j, u32 stage) {
    u32 to = ring + stage * STAGE_BYTES + ROWS * ROW_BYTES, arrived = ready + stage * 8;
    int column = tile.first_column + j * DEPTH;
    expect_bytes(arrived, (COPIED + OUTPUTS) * ROW_BYTES);
    fetch(w_map, column, tile.first_output, to, arrived);
    if constexpr (GATED) fetch(w_map, column, outputs + tile.first_output, to + COLUMNS * ROW_BYTES, arrived);
  }

  __device__ __forceinline__ void fetch_rows(const Tile& tile, int j, u32 stage) {
    u32 first = SPLIT ? 0 : own * SHARE;
    u32 to = ring + stage * STAGE_BYTES + first * ROW_BYTES;
    fetch_for_all(x_map, tile.first_column + j * DEPTH, tile.first_row + first, to, ready + stage * 8);
  }

  // Weights never change, so the ring is full of them before the kernel ahead has ended.
  __device__ __forceinline__ void begin(int first) {
    Tile tile(first, own, row_tiles, out_blocks, rounds);
    for (int j = 0; j < min(rounds, (int)STAGES); j++) fetch_weights(tile, j, j);
    let_next_kernel_start();
    wait_for_kernel_ahead();
  }

  __device__ __forceinline__ void go_on(int first) {
    u32 stage = 0, parity = 1;  // of the lap before: the first one's stages are free
    for (int index = first; index < tiles; index += gridDim.x / CLUSTER) {
      Tile tile(index, own, row_tiles, out_blocks, rounds);
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
__device__ __forceinline__ void store_row(const float (&sums)[PIECES][OUTPUTS / PIECES / 2], int half, char* row,
                                          int first_output, int outputs, bool held, u32 lane) {
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

// The programs of a cluster lay out their sums, and each adds up those of some rows, in order, as float32.
__device__ __forceinline__ void add_up(const float (&sums)[ROW_BLOCKS][PIECES][OUTPUTS / PIECES / 2], u32 group,
                                       u32 buffer, u32 own, const Tile& tile, char* out, int num_rows, int outputs) {
  constexpr u32 PITCH = (OUTPUTS + 8) * 4;  // eight more, so that rows begin in different banks
  constexpr int PIECE_BLOCKS = OUTPUTS / PIECES / 8;
  u32 thread = threadIdx.x % 128, lane = thread % 32;
  meet<128 * GROUPS>(1);  // until the others, too, have multiplied what lay there
#pragma unroll
  for (u32 block = 0; block < ROW_BLOCKS; block++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 row = (group * ROW_BLOCKS + block) * 64 + thread / 32 * 16 + half * 8 + lane / 4;
#pragma unroll
      for (int at = 0; at < OUTPUTS / 8; at++) {
        const float* pair = &sums[block][at / PIECE_BLOCKS][at % PIECE_BLOCKS * 4 + half * 2];
        store_two(buffer + row * PITCH + (at * 8 + lane % 4 * 2) * 4, pair[0], pair[1]);
      }
    }
  }
  cluster_publish();
  cluster_wait();
  constexpr u32 OWN_ROWS = ROWS / CLUSTER, FOURS = OUTPUTS / 4;
  u32 consumer = threadIdx.x - 128;
  for (u32 index = consumer; index < OWN_ROWS * FOURS; index += 128 * GROUPS) {
    u32 row = own * OWN_ROWS + index / FOURS, column = index % FOURS * 4;
    float total[4] = {0, 0, 0, 0};
#pragma unroll
    for (u32 program = 0; program < CLUSTER; program++) {
      add_four(total, buffer + row * PITCH + column * 4, program);
    }
    if (tile.first_row + row < num_rows && tile.first_output + column < outputs) {
      u64 at = (u64)(tile.first_row + row) * outputs + tile.first_output + column;
      *(float4*)(out + at * 4) = make_float4(total[0], total[1], total[2], total[3]);
    }
  }
}

__device__ __forceinline__ void consume(u32 group, u32 ring, u32 ready, u32 empty, u32 own, char* out, int num_rows,
                                        int outputs, int rounds, int row_tiles, int out_blocks, int tiles) {
  constexpr u32 ELEMENT_BYTES = FLOAT32 ? 4 : 2;
  u32 thread = threadIdx.x % 128, lane = thread % 32;
  u32 stage = 0, parity = 0;
  float sums[ROW_BLOCKS][PIECES][OUTPUTS / PIECES / 2];
  auto release = [&](u32 read) {
    if constexpr (SHARERS == 1) {
      if (thread == 0) arrive(empty + read * 8);
    } else {
      if (thread < SHARERS) release_to(empty + read * 8, thread);
    }
  };
  for (int index = blockIdx.x / CLUSTER; index < tiles; index += gridDim.x / CLUSTER) {
    Tile tile(index, own, row_tiles, out_blocks, rounds);
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
        wait_for_products<1>();
        release(before);
      }
      before = stage;
      if (++stage == STAGES) {
        stage = 0;
        parity ^= 1;
      }
    }
    wait_for_products<0>();
#pragma unroll
    for (u32 block = 0; block < ROW_BLOCKS; block++) {
#pragma unroll
      for (u32 piece = 0; piece < PIECES; piece++) keep_behind(sums[block][piece]);
    }
    release(before);
    if constexpr (SPLIT) {
      char* part = out + (u64)(index / (row_tiles * out_blocks)) * num_rows * outputs * ELEMENT_BYTES;
      add_up(sums, group, ring, own, tile, part, num_rows, outputs);
      return;  // the ring is the sums' now, and there was but one tile
    } else {
#pragma unroll
      for (u32 block = 0; block < ROW_BLOCKS; block++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          int row = tile.first_row + (group * ROW_BLOCKS + block) * 64 + thread / 32 * 16 + half * 8 + lane / 4;
          char* at = out + (u64)row * outputs * ELEMENT_BYTES;
          store_row(sums[block], half, at, tile.first_output, outputs, row < num_rows, lane);
        }
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
    product(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, char* out, int num_rows,
            int outputs, int rounds, int row_tiles, int out_blocks, int tiles) {
  extern __shared__ char shared[];
  __shared__ u64 barriers[2 * STAGES];
  u32 ring = (shared_address(shared) + 1023) / 1024 * 1024;
  u32 ready = shared_address(barriers), empty = ready + STAGES * 8;
  u32 own;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(own));
  if (threadIdx.x == 0) {
    for (u32 stage = 0; stage < STAGES; stage++) {
      init_barrier(ready + stage * 8, 1);
      init_barrier(empty + stage * 8, GROUPS * SHARERS);
    }
    publish_barriers();
  }
  __syncthreads();
  cluster_arrive();
  int first = blockIdx.x / CLUSTER;
  if (threadIdx.x < 128) {
    if constexpr (GROUPS > 1) give_registers<PRODUCER_REGISTERS>();
    Producer producer{&x_map, &w_map, ring, ready, empty, own, outputs, rounds, row_tiles, out_blocks, tiles};
    if (threadIdx.x == 0) producer.begin(first);
    __syncwarp();
    cluster_wait();  // until then another program's barriers may not be set up
    if (threadIdx.x == 0) producer.go_on(first);
    __syncwarp();
    if constexpr (SPLIT) {
      cluster_arrive();  // with those who add up
      cluster_wait();
    }
  } else {
    if constexpr (GROUPS > 1) take_registers<CONSUMER_REGISTERS>();
    cluster_wait();
    consume(threadIdx.x / 128 - 1, ring, ready, empty, own, out, num_rows, outputs, rounds, row_tiles, out_blocks,
            tiles);
  }
  // A program whose shared memory others of its cluster may still use must not end.
  cluster_arrive();
  cluster_wait();
}
