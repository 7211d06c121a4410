// Single instructions of Hopper that C++ has no word for: barriers in shared memory, the copy engine (TMA), warp-group
// products (wgmma) and what they are told of matrices. BFLOAT16: whether elements are bfloat16, or float16.

struct alignas(64) TensorMap {
  u64 words[16];
};

__device__ __forceinline__ u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

__device__ __forceinline__ void init_barrier(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Until the phase of this parity is over; a barrier that was never used counts as past a phase of parity 1.
__device__ __forceinline__ void wait_for(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!done);
}

__device__ __forceinline__ void fetch(const TensorMap* map, int x, int y, u32 to, u32 ready) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(to), "l"(map), "r"(x), "r"(y), "r"(ready)
      : "memory");
}

__device__ __forceinline__ void fetch(const TensorMap* map, int x, int y, int z, u32 to, u32 ready) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(ready)
      : "memory");
}

// Bytes that lie together, as they are.
__device__ __forceinline__ void fetch_bytes(const char* from, u32 bytes, u32 to, u32 ready) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(ready)
               : "memory");
}

// A thread's own copies, of sixteen bytes each: they go on behind it, and it arrives once all so far have come.
__device__ __forceinline__ void copy_sixteen_or_zeros(u32 to, const void* from, bool is_there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void arrive_behind_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// Of a dependent launch: the next kernel's programs may start where there is room, and what the last one wrote is there.
__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void wait_for_kernel_ahead() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Barriers by number among whole warps; THREADS counts those that wait and those that only arrive.
template <u32 THREADS>
__device__ __forceinline__ void meet(u32 number) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
}

template <u32 THREADS>
__device__ __forceinline__ void call(u32 number) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
}

// A warp group keeps this many registers a thread, or takes this many once others have given theirs.
template <u32 COUNT>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <u32 COUNT>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// For what a warp's threads have in common: told so, the compiler keeps it once for all of them.
__device__ __forceinline__ u32 same_in_warp(u32 value) { return __shfl_sync(0xFFFFFFFF, value, 0); }

// What the compiler keeps: it would rather compute it again for each use.
__device__ __forceinline__ u32 kept(u32 value) { return __shfl_xor_sync(0xFFFFFFFF, value, 0); }

__device__ __forceinline__ void clear_sixteen(u32 address) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}

__device__ __forceinline__ uint4 load_sixteen(u32 address) {
  uint4 found;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w)
               : "r"(address)
               : "memory");
  return found;
}

__device__ __forceinline__ u32 load_word(u32 address) {
  u32 found;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(found) : "r"(address) : "memory");
  return found;
}

// Of two bfloat16 each; what is subnormal counts.
__device__ __forceinline__ u32 multiply_add_pairs(u32 first, u32 second, u32 added) {
  u32 found;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(found) : "r"(first), "r"(second), "r"(added));
  return found;
}

__device__ __forceinline__ void store_four(u32 address, float first, float second, float third, float fourth) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(first), "f"(second), "f"(third),
               "f"(fourth)
               : "memory");
}

// What threads wrote to shared memory before this, the copy engine and products read after it.
__device__ __forceinline__ void show_to_engines() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A matrix in shared memory, as wgmma is told of it: rows of 128 bytes, swizzled as the copy engine does it, eight rows
// to 1024 bytes. `next_slice`, for a matrix whose rows run along the sum's depth (values): bytes from 64 columns to the
// next 64.
__device__ __forceinline__ u64 matrix_at(u32 address, u32 next_slice = 16) {
  return (u64)((address & 0x3FFFF) >> 4) | (u64)(next_slice >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// The same, rows of which lie together, some bytes behind a sixteenth of an address.
__device__ __forceinline__ u64 matrix_beside(u32 sixteenth, u32 bytes) {
  return (u64)(sixteenth + bytes / 16 + (1 << 16)) | (u64)(1024 >> 4 | 1 << 30) << 32;
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until all but the last LEFT groups of products are done, whose sums must not be touched yet.
template <u32 LEFT>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Behind a wait: nothing that reads these sums moves ahead of it.
template <u32 COUNT>
__device__ __forceinline__ void keep_behind(float (&sums)[COUNT]) {
#pragma unroll
  for (u32 i = 0; i < COUNT; i++) asm volatile("" : "+f"(sums[i])::"memory");
}

template <u32 LEFT, u32 COUNT>
__device__ __forceinline__ void wait_for_products(float (&sums)[COUNT]) {
  wait_for_products<LEFT>();
  keep_behind(sums);
}

__device__ __forceinline__ u32 packed(float low, float high) {
  u32 both;
  if constexpr (BFLOAT16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  }
  return both;
}

// Of two float16.
__device__ __forceinline__ float2 floats_of_halves(u32 both) {
  float2 found;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
      : "=f"(found.x), "=f"(found.y)
      : "r"(both));
  return found;
}

__device__ __forceinline__ float power_of_two(float exponent) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
  return power;
}

// Four lanes hold two columns each of four groups of eight; afterwards each lane has all eight of its group.
__device__ __forceinline__ void exchange(u32 (&word)[4], u32 lane) {
  bool odd = lane & 1, high = lane & 2;
  u32 first = __shfl_xor_sync(0xFFFFFFFF, odd ? word[0] : word[1], 1);
  u32 second = __shfl_xor_sync(0xFFFFFFFF, odd ? word[2] : word[3], 1);
  (odd ? word[0] : word[1]) = first;
  (odd ? word[2] : word[3]) = second;
  first = __shfl_xor_sync(0xFFFFFFFF, high ? word[0] : word[2], 2);
  second = __shfl_xor_sync(0xFFFFFFFF, high ? word[1] : word[3], 2);
  (high ? word[0] : word[2]) = first;
  (high ? word[1] : word[3]) = second;
}
