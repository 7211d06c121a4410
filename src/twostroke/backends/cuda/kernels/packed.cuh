// Products with weights of twelve bits (packing.py says how they lie): a round's weights come to shared memory as
// they are, each thread makes bfloat16 of those it multiplies, and tensor cores take them from its registers. Common to
// dense products and experts'. Behind hopper_primitives.cuh and `multiply`, a wgmma instruction that takes 64 rows of
// weights from registers and ROWS tokens from shared memory (wgmma.py).
//   ROWS    tokens of a tile                        GROUPS  warp groups that multiply
//   UNITS   units of 64 weight rows of each group   STAGES  length of the ring
//   SHARED  whether groups have the same units, and take turns in their rounds
//   STEPS   steps of 16 inputs, of a round's four, that are unpacked and multiplied together
//   GATED   0 no, 1 SiLU, 2 GELU (tanh)

constexpr u32 DEPTH = 64;  // inputs a round: 128 bytes of a token, the widest that is spread over shared memory's banks
constexpr u32 ROW_BYTES = DEPTH * 2;
constexpr u32 UNIT_BYTES = 64 * DEPTH * 3 / 2;  // of a round
constexpr u32 TURNS = SHARED ? GROUPS : 1;
static_assert(STAGES % TURNS == 0, "a group must meet the same stages in every lap");
constexpr u32 TILE_UNITS = SHARED ? UNITS : GROUPS * UNITS;
constexpr u32 STAGE_BYTES = ROWS * ROW_BYTES + TILE_UNITS * UNIT_BYTES;
constexpr u32 CONSUMER_WARPS = 4 * GROUPS / TURNS;  // of a round
// Together no more than what a launch hands out: 168, 128 or 96 a thread. A warp group waits for ever for more.
constexpr bool FEW = ROWS <= 64;
constexpr u32 PRODUCER_REGISTERS = GROUPS > 3 ? (FEW ? 64 : 32) : GROUPS == 3 ? (FEW ? 80 : 32) : FEW ? 88 : 24;
constexpr u32 CONSUMER_REGISTERS = GROUPS > 3 ? (FEW ? 104 : 112) : GROUPS == 3 ? (FEW ? 144 : 160) : FEW ? 208 : 240;

// Each byte with its code above it is a weight: two in a word. Their exponents are 0 to 15, so they are subnormal or hardly
// more, which tensor cores take as they are; their sums are brought back by what was taken off, 2^112. Float32 holds
// sums so small to 2^-37 of a row's largest weight times an input of one: less than what results in bfloat16 are rounded
// by, unless all inputs are tiny.
constexpr float TAKEN_OFF = 5.192296858534828e33f;

__device__ __forceinline__ void four_weights(u32* weights, u32 bytes, u32 codes) {
  weights[0] = __byte_perm(bytes, codes, 0x5140);
  weights[1] = __byte_perm(bytes, codes, 0x7362);
}

// The eight weights that a thread gives to one instruction: their low bytes, and a word with the other four bits of each,
// where a turn by four brings those of the second half to where those of the first are.
__device__ __forceinline__ void unpack(u32 (&weights)[4], u32 first, u32 second, u32 codes) {
  four_weights(weights, first, codes & 0x87878787);
  four_weights(weights + 2, second, __funnelshift_l(codes, codes, 4) & 0x87878787);
}

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

// A group's rounds of a tile: while tensor cores multiply some steps, threads unpack the next. Afterwards the sums are
// there and the stages free. Each warp says that it has read a stage. `await` waits until a round has come. Where all
// steps of a round are unpacked together, a group's rounds are an even number.
template <class Await>
__device__ __forceinline__ void multiply_tile(float (&sums)[UNITS][ROWS / 2], u32 ring, u32 empty, Place& place,
                                              int rounds, u32 group, u32 thread, Await await) {
  Weights some, others;
  u32 before = 0, own_unit = SHARED ? 0 : group * UNITS;
  u32 own = ROWS * ROW_BYTES + own_unit * UNIT_BYTES + thread / 32 * (UNIT_BYTES / 4) + thread % 32 * 16;
  auto release = [&](u32 stage) {
    if (thread % 32 == 0) arrive(empty + stage * 8);
  };
  auto multiply_steps = [&](Weights& weights, u32 first_step, bool keep) {
    u32 tokens = ring + place.stage * STAGE_BYTES;
    u64 columns = matrix_at(tokens) + first_step * 2;
#pragma unroll
    for (u32 unit = 0; unit < UNITS; unit++) {
      u32 from = tokens + own + unit * UNIT_BYTES;
      uint4 codes = load_sixteen(from + 1024);
      u32 of_step[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
      for (u32 step = 0; step < STEPS; step += 2) {
        uint4 numbers = load_sixteen(from + (first_step + step) / 2 * 512);
        bool is_odd = first_step % 2;  // where steps go one by one
        u32 code = of_step[first_step + step];
        unpack(weights.words[unit][step], is_odd ? numbers.z : numbers.x, is_odd ? numbers.w : numbers.y, code);
        if constexpr (STEPS > 1) {
          unpack(weights.words[unit][step + 1], numbers.z, numbers.w, of_step[first_step + step + 1]);
        }
      }
    }
    begin_products();
#pragma unroll
    for (u32 unit = 0; unit < UNITS; unit++) {
#pragma unroll
      for (u32 k = 0; k < STEPS; k++) multiply(sums[unit], weights.words[unit][k], columns + k * 2, keep || k > 0);
    }
    end_products();
    wait_for_products<1>();
  };
  int j = SHARED ? group : 0;
  auto round = [&](Weights& first, Weights& second) {
    await(place, j);
    bool begun = j >= TURNS;
    multiply_steps(first, 0, begun);
    if (begun) release(before);
    if constexpr (STEPS == 2) multiply_steps(second, 2, true);
    if constexpr (STEPS == 1) {
      multiply_steps(second, 1, true);
      multiply_steps(first, 2, true);
      multiply_steps(second, 3, true);
    }
    before = place.stage;
    place.advance(TURNS);
    j += TURNS;
  };
  while (j < rounds) {
    round(some, others);
    if constexpr (STEPS == 4) round(others, some);  // unasked: behind a branch, products would wait for one another
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
template <class Element>
__device__ __forceinline__ void store_unit(const float (&sums)[ROWS / 2], const float* factors, Element* out, u32 unit,
                                           u32 outputs, u32 held, u32 thread, u32 group) {
  u32 lane = thread % 32, row = unit * 64 + thread / 32 * 16 + lane / 4;
  float upper = factors[row], lower = factors[row + 8];
  bool odd = lane & 4;
  u32 output = GATED ? row / 16 * 8 + row % 8 : row;
#pragma unroll
  for (u32 block = 0; block < ROWS / 8; block++) {
    if (SHARED && block % GROUPS != group) continue;
    u32 token = block * 8 + lane % 4 * 2;
    const float* own_sums = sums + block * 4;
    float first = own_sums[0] * TAKEN_OFF * upper, second = own_sums[1] * TAKEN_OFF * upper;
    float first_below = own_sums[2] * TAKEN_OFF * lower, second_below = own_sums[3] * TAKEN_OFF * lower;
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
