// hopper_primitives.cuh for a CPU: one program at a time, a fibre for each thread, in random order. Copies arrive late
// and in any order, and products are done when a thread waits for them and not before, so what is read, released or
// overwritten too early gives wrong results here; what waits for nobody is told as a deadlock. Shared memory is swizzled
// as the PTX manual says that the copy engine and wgmma do.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <vector>

typedef unsigned int u32;
typedef unsigned long long u64;
#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
using std::max;
using std::min;

struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float __uint_as_float(u32 bits) { float f; memcpy(&f, &bits, 4); return f; }
inline u32 __byte_perm(u32 low, u32 high, u32 selector) {
  u64 bytes = (u64)high << 32 | low;
  u32 chosen = 0;
  for (u32 i = 0; i < 4; i++) chosen |= (u32)(bytes >> (selector >> i * 4 & 7) * 8 & 0xFF) << i * 8;
  return chosen;
}
inline u32 __funnelshift_l(u32 low, u32 high, u32 by) { return by ? high << by | low >> (32 - by) : high; }
inline float __fdividef(float first, float second) { return first / second; }
inline float __expf(float exponent) { return expf(exponent); }
inline float __int_as_float(u32 bits) { float f; memcpy(&f, &bits, 4); return f; }

struct TensorMap {  // what box_map tells the driver
  const char* address;
  long long sizes[3], strides[3], box[3];  // elements; unused dimensions have size 1
};

// ---- threads ----
struct Index { u32 x; };
inline Index blockDim{128 * (WARP_GROUPS + 1)};
constexpr u32 THREADS = 128 * (WARP_GROUPS + 1);
struct Fibre { ucontext_t context; std::vector<char> stack; bool done = false; };
inline std::vector<Fibre> fibres;
inline ucontext_t scheduler;
inline u32 current;
inline Index blockIdx, gridDim;
#define threadIdx (Index{current})
inline std::mt19937 chance;
inline u64 progress;  // counts everything that may end somebody's wait
inline u64 laps;      // times that every thread had its turn
inline void yield() { swapcontext(&fibres[current].context, &scheduler); }
template <class Condition> void block(Condition condition) {
  while (!condition()) yield();
  progress++;
}

// ---- shared memory and barriers ----
alignas(1024) inline char arena[256 << 10];
constexpr u32 STATIC_BYTES = 1024;  // the kernel's named shared variables; its dynamic memory follows
inline u32 shared_address(const void* pointer) { return (u32)((const char*)pointer - arena); }
inline u32 swizzled(u32 address) { return address ^ ((address >> 7 & 7) << 4); }

struct Barrier { u32 arrivals, left, phase = 0; long long bytes = 0; };
inline std::map<u32, Barrier> barriers_at;
inline void settle(Barrier& b) {
  if (b.left == 0 && b.bytes == 0) b.left = b.arrivals, b.phase ^= 1, progress++;
}
inline void init_barrier(u32 at, u32 arrivals) { barriers_at[at] = {arrivals, arrivals}; }
inline void publish_barriers() {}
inline void arrive(u32 at) {
  Barrier& b = barriers_at.at(at);
  if (b.left == 0) { fprintf(stderr, "a barrier got more arrivals than it expects\n"); abort(); }
  b.left--;
  settle(b);
}
inline void expect_bytes(u32 at, u32 bytes) { barriers_at.at(at).bytes += bytes; arrive(at); }
inline void wait_for(u32 at, u32 parity) { block([&] { return barriers_at.at(at).phase != parity; }); }

struct Meeting { u32 came = 0, round = 0; };
inline Meeting meetings[16], warp_meetings[32];
inline void come(Meeting& m, u32 threads) { if (++m.came == threads) m.came = 0, m.round++, progress++; }
inline void meet_at(Meeting& m, u32 threads) {
  u32 round = m.round;
  come(m, threads);
  block([&] { return m.round != round; });
}
template <u32 COUNT> void meet(u32 number) { meet_at(meetings[number], COUNT); }
template <u32 COUNT> void call(u32 number) { come(meetings[number], COUNT); }
inline void __syncthreads() { meet_at(meetings[0], THREADS); }
inline void __syncwarp() { meet_at(warp_meetings[current / 32], 32); }
template <u32 COUNT> void give_registers() {}
template <u32 COUNT> void take_registers() {}
inline void show_to_engines() {}
inline void let_next_kernel_start() {}
inline void wait_for_kernel_ahead() {}
inline void clear_sixteen(u32 address) { memset(arena + address, 0, 16); }
inline uint4 load_sixteen(u32 address) { uint4 found; memcpy(&found, arena + address, 16); return found; }
inline u32 load_word(u32 address) { u32 found; memcpy(&found, arena + address, 4); return found; }
inline void store_four(u32 address, float first, float second, float third, float fourth) {
  float four[4] = {first, second, third, fourth};
  memcpy(arena + address, four, 16);
}

inline u64 shuffled[THREADS];
template <class T> T lane_value(T value, u32 lane) {
  shuffled[current] = 0;
  memcpy(&shuffled[current], &value, sizeof value);
  __syncwarp();
  T got;
  memcpy(&got, &shuffled[current / 32 * 32 + lane % 32], sizeof got);
  __syncwarp();
  return got;
}
template <class T> T __shfl_sync(u32, T value, u32 lane) { return lane_value(value, lane); }
template <class T> T __shfl_xor_sync(u32, T value, u32 mask) { return lane_value(value, current % 32 ^ mask); }
inline bool __any_sync(u32, bool value) {
  bool any = false;
  shuffled[current] = value;
  __syncwarp();
  for (u32 i = 0; i < 32; i++) any |= shuffled[current / 32 * 32 + i] != 0;
  __syncwarp();
  return any;
}
inline u32 kept(u32 value) { return value; }
inline u32 same_in_warp(u32 value) { return __shfl_sync(0, value, 0); }
inline int atomicAdd(int* at, int value) { int old = *at; *at += value; return old; }

// ---- the copy engine ----
constexpr u32 NOBODY = ~0u;
struct Copy { std::function<void()> finish; u32 thread = NOBODY; };
inline std::deque<Copy> copies;
// Any of them, but a thread's own in their order.
inline void finish_a_copy() {
  auto chosen = copies.begin() + chance() % copies.size();
  if (chosen->thread != NOBODY)
    chosen = std::find_if(copies.begin(), chosen, [&](const Copy& other) { return other.thread == chosen->thread; });
  Copy copy = *chosen;
  copies.erase(chosen);
  copy.finish();
}
inline void fetch(const TensorMap* map, int x, int y, int z, u32 to, u32 ready) {
  if (to % 1024 || map->box[0] != 64) { fprintf(stderr, "a copy to %u\n", to); abort(); }
  copies.push_back({[=] {
    u32 row = 0;
    for (long long k = z; k < z + map->box[2]; k++)
      for (long long j = y; j < y + map->box[1]; j++, row++)
        for (u32 piece = 0; piece < 8; piece++) {
          char* at = arena + swizzled(to + row * 128 + piece * 16);
          bool inside = x + piece * 8 + 8 <= map->sizes[0] && j >= 0 && j < map->sizes[1] && k >= 0 && k < map->sizes[2];
          long long from = x + piece * 8 + j * map->strides[1] + k * map->strides[2];
          inside ? memcpy(at, map->address + from * 2, 16) : memset(at, 0, 16);
        }
    Barrier& b = barriers_at.at(ready);
    b.bytes -= row * 128;
    settle(b);
  }});
}
inline void fetch(const TensorMap* map, int x, int y, u32 to, u32 ready) { fetch(map, x, y, 0, to, ready); }
inline void fetch_bytes(const char* from, u32 bytes, u32 to, u32 ready) {
  if (to % 16 || bytes % 16) { fprintf(stderr, "a copy of %u bytes to %u\n", bytes, to); abort(); }
  copies.push_back({[=] {
    memcpy(arena + to, from, bytes);
    Barrier& b = barriers_at.at(ready);
    b.bytes -= bytes;
    settle(b);
  }});
}
inline void copy_sixteen_or_zeros(u32 to, const void* from, bool is_there) {
  copies.push_back({[=] {
    if (is_there) memcpy(arena + to, from, 16);
    else memset(arena + to, 0, 16);
  }, current});
}
inline void arrive_behind_copies(u32 barrier) {
  copies.push_back({[=] { arrive(barrier); }, current});
}

// ---- numbers ----
inline float number(unsigned short bits) {
  if (BFLOAT16) return __int_as_float((u32)bits << 16);
  _Float16 half;
  memcpy(&half, &bits, 2);
  return (float)half;
}
inline u32 rounded(float value) {
  if (BFLOAT16) {
    u32 bits;
    memcpy(&bits, &value, 4);
    return std::isnan(value) ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  }
  _Float16 half = (_Float16)value;
  unsigned short bits;
  memcpy(&bits, &half, 2);
  return bits;
}
inline u32 multiply_add_pairs(u32 first, u32 second, u32 added) {
  u32 both = 0;
  for (u32 at = 0; at < 32; at += 16) {
    double product = (double)number(first >> at) * number(second >> at);
    both |= rounded((float)(product + number(added >> at))) << at;
  }
  return both;
}
inline u32 packed(float low, float high) { return rounded(low) | rounded(high) << 16; }
inline float2 floats_of_halves(u32 both) {
  _Float16 halves[2];
  memcpy(halves, &both, 4);
  return {(float)halves[0], (float)halves[1]};
}
inline float power_of_two(float exponent) { return exp2f(exponent); }
inline void exchange(u32 (&word)[4], u32 lane) {
  u32 mine[4];
  for (u32 i = 0; i < 4; i++) {
    for (u32 from = 0; from < 4; from++) {
      u32 got = lane_value(word[i], lane / 4 * 4 + from);
      if (i == lane % 4) mine[from] = got;
    }
  }
  std::copy(mine, mine + 4, word);
}

// ---- products ----
inline u64 matrix_at(u32 address, u32 next_slice = 16) {
  return (u64)(address >> 4) | (u64)(next_slice >> 4) << 16 | (u64)64 << 32 | (u64)1 << 62;
}
inline u64 matrix_beside(u32 sixteenth, u32 bytes) { return matrix_at(sixteenth * 16 + bytes); }
inline u32 start_of(u64 matrix) { return (u32)(matrix & 0x3FFF) << 4; }
inline u32 leading_of(u64 matrix) { return (u32)(matrix >> 16 & 0x3FFF) << 4; }
inline u32 stride_of(u64 matrix) { return (u32)(matrix >> 32 & 0x3FFF) << 4; }
inline float element(u64 matrix, u32 row, u32 depth, bool rows_contiguous) {
  u32 offset = rows_contiguous
                   ? row % 64 * 2 + row / 64 * leading_of(matrix) + depth % 8 * 128 + depth / 8 * stride_of(matrix)
                   : row / 8 * stride_of(matrix) + row % 8 * 128 + depth * 2;
  unsigned short bits;
  memcpy(&bits, arena + swizzled(start_of(matrix) + offset), 2);
  return number(bits);
}

struct Product {
  float* sums;
  const u32* registers;  // null: the rows are in shared memory
  u64 rows, columns;
  u32 width;
  bool keep, contiguous;
};
struct WarpGroup {
  std::vector<std::vector<Product>> groups[128];
  size_t executed = 0, complete = 0;  // groups done, and groups that all threads have begun
  u64 due = 0;                        // when the last of the latter is done
};
constexpr u32 LONGEST_PRODUCT = 40;  // laps
inline WarpGroup warp_groups[WARP_GROUPS + 1];

// All threads' share of one instruction.
inline void execute(WarpGroup& g, size_t group, size_t index) {
  const Product& any = g.groups[0][group][index];
  std::vector<float> left(64 * 16), right(any.width * 16);
  for (u32 row = 0; row < 64; row++) {
    for (u32 k = 0; k < 16; k++) {
      if (any.registers) {
        u32 thread = row / 16 * 32 + row % 8 * 4 + k % 8 / 2;
        u32 word = g.groups[thread][group][index].registers[row % 16 / 8 + k / 8 * 2];
        left[row * 16 + k] = number(word >> k % 2 * 16);
      } else {
        left[row * 16 + k] = element(any.rows, row, k, false);
      }
    }
  }
  for (u32 n = 0; n < any.width; n++)
    for (u32 k = 0; k < 16; k++) right[n * 16 + k] = element(any.columns, n, k, any.contiguous);
  for (u32 thread = 0; thread < 128; thread++) {
    const Product& own = g.groups[thread][group][index];
    for (u32 i = 0; i < any.width / 2; i++) {
      u32 row = thread / 32 * 16 + i / 2 % 2 * 8 + thread % 32 / 4, n = i / 4 * 8 + thread % 4 * 2 + i % 2;
      float sum = any.keep ? own.sums[i] : 0.0f;
      for (u32 k = 0; k < 16; k++) sum += left[row * 16 + k] * right[n * 16 + k];
      own.sums[i] = sum;
    }
  }
}
inline std::vector<std::vector<Product>>& own_groups() {
  auto& groups = warp_groups[current / 128].groups[current % 128];
  if (groups.empty()) groups.emplace_back();
  return groups;
}
inline void begin_products() {}
inline void end_products() { own_groups().emplace_back(); }
template <u32 LEFT> void wait_for_products() {
  WarpGroup& g = warp_groups[current / 128];
  size_t wanted = own_groups().size() - 1 - LEFT;
  block([&] {
    if (g.executed >= wanted) return true;
    if (!std::all_of(g.groups, g.groups + 128, [&](auto& groups) { return groups.size() > wanted; })) return false;
    if (g.complete < wanted) g.complete = wanted, g.due = laps + chance() % LONGEST_PRODUCT;
    progress++;
    return laps >= g.due;
  });
  for (; g.executed < wanted; g.executed++)
    for (size_t i = 0; i < g.groups[0][g.executed].size(); i++) execute(g, g.executed, i);
}
template <u32 LEFT, u32 COUNT> void wait_for_products(float (&)[COUNT]) { wait_for_products<LEFT>(); }
template <u32 COUNT> void keep_behind(float (&)[COUNT]) {}
template <u32 COUNT> void queue(float (&sums)[COUNT], const u32* registers, u64 rows, u64 columns, int keep, bool mn) {
  own_groups().back().push_back({sums, registers, rows, columns, COUNT * 2, keep != 0, mn});
}
template <u32 COUNT> void multiply_keys(float (&sums)[COUNT], u64 rows, u64 columns, int keep) {
  queue(sums, nullptr, rows, columns, keep, false);
}
template <u32 COUNT> void multiply(float (&sums)[COUNT], const u32* rows, u64 columns, int keep) {
  queue(sums, rows, 0, columns, keep, false);
}
template <u32 COUNT> void multiply_values(float (&sums)[COUNT], const u32* rows, u64 columns, int keep) {
  queue(sums, rows, 0, columns, keep, true);
}

// ---- running a program ----
inline std::function<void()> body;
inline void enter() {
  body();
  fibres[current].done = true;
  progress++;
  yield();
}
// Whether every thread came to its end.
inline bool run_program(u32 program, u32 programs, std::function<void()> kernel) {
  blockIdx.x = program, gridDim.x = programs, body = kernel;
  static const int LEFT_THERE[] = {0xFF, 0x4B, 0xCB};  // NaN in all formats, or large numbers
  memset(arena, LEFT_THERE[chance() % 3], sizeof arena);
  barriers_at.clear();
  for (auto& g : warp_groups) g = WarpGroup();
  for (auto& m : meetings) m = Meeting();
  for (auto& m : warp_meetings) m = Meeting();
  fibres.clear();
  fibres.resize(THREADS);
  std::vector<u32> order(THREADS);
  for (u32 i = 0; i < THREADS; i++) {
    order[i] = i;
    fibres[i].stack.resize(64 << 10);
    getcontext(&fibres[i].context);
    fibres[i].context.uc_stack.ss_sp = fibres[i].stack.data();
    fibres[i].context.uc_stack.ss_size = fibres[i].stack.size();
    makecontext(&fibres[i].context, enter, 0);
  }
  for (;;) {
    u64 before = progress;
    laps++;
    std::shuffle(order.begin(), order.end(), chance);
    for (u32 thread : order) {
      if (fibres[thread].done) continue;
      current = thread;
      swapcontext(&scheduler, &fibres[thread].context);
    }
    bool idle = progress == before;
    while (!copies.empty() && (idle || chance() % 4 == 0)) {
      finish_a_copy();
      progress++;
      if (idle) break;
    }
    if (std::all_of(fibres.begin(), fibres.end(), [](auto& f) { return f.done; })) return copies.empty();
    if (progress == before) return false;
  }
}
