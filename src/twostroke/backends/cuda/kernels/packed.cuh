// Products with weights of few bits: a round's weights come to shared memory as they are, each thread makes bfloat16 of
// those it multiplies (codes.cuh), and tensor cores take them from its registers. Common to dense products and experts'.
// Behind hopper_primitives.cuh, codes.cuh and `multiply`, a wgmma instruction that takes 64 rows of weights from
// registers and ROWS tokens from shared memory (wgmma.py).
//   ROWS    tokens of a tile                        GROUPS  warp groups that multiply
//   UNITS   units of 64 weight rows of each group   STAGES  length of the ring
//   SHARED  whether groups have the same units, and take turns in their rounds
//   STEPS   steps of 16 inputs, of a round's, that are unpacked and multiplied together
//   AT_ONCE programs that a multiprocessor runs beside each other
//   GATED   0 no, else as gates.cuh has it         BIAS    whether a bias is added

constexpr u32 ROW_BYTES = 128;  // of a token in a slice: the widest that is spread over shared memory's banks
constexpr u32 SLICE_BYTES = ROWS * ROW_BYTES;
constexpr u32 TOKEN_BYTES = DEPTH / 64 * SLICE_BYTES;  // of a round: slices of 64 inputs
constexpr u32 CALLS = DEPTH / 16 / STEPS;  // of `multiply_steps` in a round
constexpr u32 TURNS = SHARED ? GROUPS : 1;
static_assert(STAGES % TURNS == 0, "a group must meet the same stages in every lap");
constexpr u32 TILE_UNITS = SHARED ? UNITS : GROUPS * UNITS;
constexpr u32 STAGE_BYTES = (TOKEN_BYTES + TILE_UNITS * UNIT_BYTES + 1023) / 1024 * 1024;
constexpr u32 CONSUMER_WARPS = 4 * GROUPS / TURNS;  // of a round
// Together no more than what a launch hands out. A warp group waits for ever for more.
constexpr bool FEW = ROWS <= 64;
constexpr u32 LAUNCHED_REGISTERS = 65536 / (128 * (GROUPS + 1) * AT_ONCE) / 8 * 8;  // of a thread
constexpr u32 PRODUCER_REGISTERS = AT_ONCE > 1 ? 32 : GROUPS > 3 ? (FEW ? 64 : 32) : GROUPS == 3 ? (FEW ? 80 : 32) : FEW ? 88 : 24;
constexpr u32 CONSUMER_REGISTERS =
    AT_ONCE > 1 || GROUPS > 3 ? (FEW ? 104 : 112) : GROUPS == 3 ? (FEW ? 144 : 160) : FEW ? 208 : 240;
static_assert(PRODUCER_REGISTERS + GROUPS * CONSUMER_REGISTERS <= LAUNCHED_REGISTERS * (GROUPS + 1), "it would hang");

struct Weights {
  u32 words[UNITS][STEPS][4];
};

// Where a ring stands, for who fills it and for who reads it.
struct Place {
  u32 stage, parity;
  __device__ __forceinline__ void advance(u32 rounds = 1) {
    stage += rounds;
    if (stage >= STAGES) {
      stage -= STAGES;
      parity ^= 1;
    }
  }
};

// A code says where a thread's part of a unit lies (`Reader`), what of a round is loaded at once (`Round`), and makes
// weights of that. Of a code that has but `unpack_steps` of a unit, each call loads what it unpacks.
#ifndef LOADS_ROUNDS
struct Round {
  u32 unit, thread;
};
struct Reader {
  u32 thread;
  __device__ __forceinline__ Round load(u32 unit) const { return {unit, thread}; }
};
__device__ __forceinline__ void unpack_steps(u32 (&words)[STEPS][4], const Round& round, u32 first_step) {
  unpack_steps(words, round.unit, round.thread, first_step);
}
#endif

// A group's rounds of a tile: while tensor cores multiply some steps, threads unpack the next. Afterwards the sums are
// there and the stages free. Each warp says that it has read a stage. `await` waits until a round has come. Where all
// steps of a round are unpacked together (CALLS == 1), a group's rounds are an even number.
template <class Await>
__device__ __forceinline__ void multiply_tile(float (&sums)[UNITS][ROWS / 2], u32 ring, u32 empty, Place& place,
                                              int rounds, u32 group, u32 thread, Await await) {
  Weights some, others;
  Round unpacked[UNITS];
  u32 before = 0, own_unit = SHARED ? 0 : group * UNITS;
  const Reader reader{thread};
  u32 first_unit = kept(ring + TOKEN_BYTES + own_unit * UNIT_BYTES), first_matrix = ring / 16;
  bool speaks = thread % 32 == 0;
  auto release = [&](u32 stage) {
    if (speaks) arrive(empty + stage * 8);
  };
#pragma unroll
  for (u32 unit = 0; unit < UNITS; unit++) {
#pragma unroll
    for (u32 i = 0; i < ROWS / 2; i++) sums[unit][i] = 0;
  }
  auto multiply_steps = [&](Weights& weights, u32 tokens, u32 first_step) {
#pragma unroll
    for (u32 unit = 0; unit < UNITS; unit++) unpack_steps(weights.words[unit], unpacked[unit], first_step);
    begin_products();
#pragma unroll
    for (u32 k = first_step; k < first_step + STEPS; k++) {
      u64 columns = matrix_beside(tokens, k / 4 * SLICE_BYTES + k % 4 * 32);
#pragma unroll
      for (u32 unit = 0; unit < UNITS; unit++) multiply(sums[unit], weights.words[unit][k - first_step], columns, true);
    }
    end_products();
    wait_for_products<1>();
  };
  int j = SHARED ? group : 0;
  auto round = [&](Weights& first, Weights& second) {
    await(place, j);
    u32 tokens = same_in_warp(first_matrix + place.stage * (STAGE_BYTES / 16));
#pragma unroll
    for (u32 unit = 0; unit < UNITS; unit++) {
      unpacked[unit] = reader.load(first_unit + place.stage * STAGE_BYTES + unit * UNIT_BYTES);
    }
    multiply_steps(first, tokens, 0);
    if (j >= TURNS) release(before);
#pragma unroll
    for (u32 i = 1; i < CALLS; i++) multiply_steps(i % 2 ? second : first, tokens, i * STEPS);
    before = place.stage;
    place.advance(TURNS);
    j += TURNS;
  };
  while (j < rounds) {
    round(some, others);
    if constexpr (CALLS == 1) round(others, some);  // unasked: behind a branch, products would wait for one another
  }
  wait_for_products<0>();
#pragma unroll
  for (u32 unit = 0; unit < UNITS; unit++) keep_behind(sums[unit]);
  release(before);
}

// Two outputs of one token: neighbours in a warp hold one output each of two tokens, and trade.
__device__ __forceinline__ u32 traded(float of_first, float of_second, bool odd) {
  float given = __shfl_xor_sync(0xFFFFFFFF, odd ? of_first : of_second, 4);
  return odd ? packed(given, of_second) : packed(of_first, given);
}

// A thread's sums of a unit: two rows of weights, eight apart, of two tokens in every eight. `out` is where the tile's
// first token begins, `held` how many tokens it has. Where groups took turns, each has the sums of some blocks of tokens.
// `bias`: bfloat16, of all outputs; of a gated product, of the gate's and then of the other's.
template <class Element>
__device__ __forceinline__ void store_unit(const float (&sums)[ROWS / 2], const float* factors,
                                           const unsigned short* bias, Element* out, u32 unit, u32 outputs, u32 held,
                                           u32 thread, u32 group) {
  u32 lane = thread % 32, row = unit * 64 + thread / 32 * 16 + lane / 4;
  float upper = HAS_FACTORS ? factors[row] : 1.0f, lower = HAS_FACTORS ? factors[row + 8] : 1.0f;
  bool odd = lane & 4;
  u32 output = GATED ? row / 16 * 8 + row % 8 : row;
  float upper_bias = 0.0f, lower_bias = 0.0f;
  if constexpr (BIAS) {
    u32 below = GATED ? outputs + output : output + 8;
    if (output < outputs) upper_bias = __uint_as_float((u32)bias[output] << 16);
    if (GATED ? output < outputs : below < outputs) lower_bias = __uint_as_float((u32)bias[below] << 16);
  }
#pragma unroll
  for (u32 block = 0; block < ROWS / 8; block++) {
    if (SHARED && block % GROUPS != group) continue;
    u32 token = block * 8 + lane % 4 * 2;
    const float* own_sums = sums + block * 4;
    float first = own_sums[0] * TAKEN_OFF * upper, second = own_sums[1] * TAKEN_OFF * upper;
    float first_below = own_sums[2] * TAKEN_OFF * lower, second_below = own_sums[3] * TAKEN_OFF * lower;
    if constexpr (BIAS) {
      first += upper_bias, second += upper_bias;
      first_below += lower_bias, second_below += lower_bias;
    }
    if constexpr (GATED) {
      first = gated(first, first_below);
      second = gated(second, second_below);
    }
    if constexpr (sizeof(Element) == 4) {
      Element* at = out + (u64)token * outputs + output;
      if (token < held && output < outputs) at[0] = first;
      if (token + 1 < held && output < outputs) at[outputs] = second;
      if (token < held && output + 8 < outputs) at[8] = first_below;
      if (token + 1 < held && output + 8 < outputs) at[outputs + 8] = second_below;
    } else {
      u32 own = token + odd, even_output = output & ~1u;
      u32 both = traded(first, second, odd);
      Element* at = out + (u64)own * outputs + even_output;
      if (own < held && even_output < outputs) *(u32*)at = both;
      if constexpr (!GATED) {
        both = traded(first_below, second_below, odd);
        if (own < held && even_output + 8 < outputs) *(u32*)(at + 8) = both;
      }
    }
  }
}
