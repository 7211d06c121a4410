// How weights of few bits are held, and how a thread makes bfloat16 of those that it gives to an instruction: of a step
// of 16 inputs, two neighbours in each of two rows eight apart, and the two eight inputs on. CODE:
//   12  bfloat16 in twelve bits (packing.py)
//    8  float8 (e4m3), by rows, in an order of inputs that gives a thread sixteen bytes of a row (eight_bits.py)
//    7  the same, of experts, as a thread takes them (expert_units.py)
//    6  floats of four bits (e2m1) with a power of two for each 32 (MXFP4), of experts (expert_units.py)
//    4  whole numbers of four bits (four_bits.py), with SCALES scales of each row in a round; OFFSETS: and as many offsets
//    5  numbers and scales as a file has them (grouped_numbers.py): HIGH bits above the lowest four, FLOAT8 or whole;
//       TABLE: of four bits, which are places among sixteen bytes; MIDDLE the number that stands for nothing;
//       SCALE_TYPE 0 float16, 1 bfloat16, 2 float32, 3 signed bytes beside a float16 of the round; OFFSETS 0 none, 1 that
//       is added, 2 the number that stands for nothing
// UNIT_BYTES are those of 64 rows in a round of DEPTH inputs. Sums are brought back by what was taken off the weights'
// exponents (TAKEN_OFF). STEPS: those that are unpacked together.

// Where a thread's first sixteen bytes of a round lie, of codes that give a warp a quarter of a unit and its lanes sixteen
// bytes in turn.
struct Place16 {
  u32 from;
};

template <u32 BYTES>
struct Reader16 {
  u32 from;
  __device__ __forceinline__ Reader16(u32 thread) : from(kept(thread / 32 * (BYTES / 4) + thread % 32 * 16)) {}
  __device__ __forceinline__ Place16 load(u32 unit) const { return {unit + from}; }
};

#if CODE == 7 || CODE == 8

// A float8's exponent and mantissa are the lowest and the highest bits of a bfloat16's: subnormal or hardly more, which
// tensor cores take as they are. 2^120.
constexpr float TAKEN_OFF = 1.329227995784916e36f;

// The upper bytes of both halves of a word.
__device__ __forceinline__ u32 two_weights(u32 word) { return word & 0x80008000 | word >> 4 & 0x07F007F0; }

#endif

#if CODE == 12

constexpr u32 DEPTH = 64;
constexpr u32 UNIT_BYTES = 64 * DEPTH * 3 / 2;
constexpr bool HAS_FACTORS = true;

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

#define LOADS_ROUNDS
using Round = Place16;
using Reader = Reader16<UNIT_BYTES>;

__device__ __forceinline__ void unpack_steps(u32 (&words)[STEPS][4], const Round& round, u32 first_step) {
  uint4 codes = load_sixteen(round.from + 1024);
  u32 of_step[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
  for (u32 step = 0; step < STEPS; step += 2) {
    uint4 numbers = load_sixteen(round.from + (first_step + step) / 2 * 512);
    bool is_odd = first_step % 2;  // where steps go one by one
    u32 code = of_step[first_step + step];
    unpack(words[step], is_odd ? numbers.z : numbers.x, is_odd ? numbers.w : numbers.y, code);
    if constexpr (STEPS > 1) unpack(words[step + 1], numbers.z, numbers.w, of_step[first_step + step + 1]);
  }
}

#elif CODE == 8

constexpr u32 DEPTH = 128;
constexpr u32 UNIT_BYTES = 64 * DEPTH;
constexpr bool HAS_FACTORS = true;
#define LOADS_ROUNDS

struct Round {
  u32 from[2];  // of its halves
};

// A row of a round is 128 bytes, and the copy engine has spread its pieces of sixteen over the banks. Of a gated unit,
// 32 rows of the gate lie ahead of 32 of the other.
struct Reader {
  u32 from[2];
  __device__ __forceinline__ Reader(u32 thread) {
    u32 lane = thread % 32, row = thread / 32 * (GATED ? 8 : 16) + lane / 4;
#pragma unroll
    for (u32 half = 0; half < 2; half++) from[half] = kept(row * 128 + ((lane % 4 * 2 + half ^ row % 8) << 4));
  }
  __device__ __forceinline__ Round load(u32 unit) const { return {{unit + from[0], unit + from[1]}}; }
};

__device__ __forceinline__ void unpack_steps(u32 (&words)[STEPS][4], const Round& round, u32 first_step) {
  u32 from = round.from[first_step / 4];
  uint4 upper = load_sixteen(from), lower = load_sixteen(from + (GATED ? 32 : 8) * 128);
  u32 uppers[4] = {upper.x, upper.y, upper.z, upper.w}, lowers[4] = {lower.x, lower.y, lower.z, lower.w};
#pragma unroll
  for (u32 step = 0; step < STEPS; step++) {
    u32 above = uppers[first_step % 4 + step], below = lowers[first_step % 4 + step];
    words[step][0] = two_weights(above);
    words[step][1] = two_weights(below);
    words[step][2] = two_weights(above << 8);
    words[step][3] = two_weights(below << 8);
  }
}

#elif CODE == 7

constexpr u32 DEPTH = 128;
constexpr u32 UNIT_BYTES = 64 * DEPTH;
constexpr bool HAS_FACTORS = true;
__device__ __forceinline__ void four_words(u32 (&words)[4], u32 above, u32 below) {
  words[0] = two_weights(above);
  words[1] = two_weights(below);
  words[2] = two_weights(above << 8);
  words[3] = two_weights(below << 8);
}

#define LOADS_ROUNDS
using Round = Place16;
using Reader = Reader16<UNIT_BYTES>;

__device__ __forceinline__ void unpack_steps(u32 (&words)[STEPS][4], const Round& round, u32 first_step) {
#pragma unroll
  for (u32 step = 0; step < STEPS; step += 2) {
    uint4 numbers = load_sixteen(round.from + (first_step + step) / 2 * 512);
    bool is_odd = first_step % 2;  // where steps go one by one
    four_words(words[step], is_odd ? numbers.z : numbers.x, is_odd ? numbers.w : numbers.y);
    if constexpr (STEPS > 1) four_words(words[step + 1], numbers.z, numbers.w);
  }
}

#elif CODE == 6

constexpr u32 DEPTH = 128;
constexpr u32 NUMBER_BYTES = 64 * DEPTH / 2;
constexpr u32 UNIT_BYTES = NUMBER_BYTES + 64 * DEPTH / 32;
constexpr bool HAS_FACTORS = false;
// A float of four bits, its sign where bfloat16 has it and the rest at the lowest bits of the exponent and the highest of
// the mantissa, is 2^126 times too small; powers of two are held 2^66 times as large as they are. 2^60.
constexpr float TAKEN_OFF = 1.152921504606847e18f;
constexpr u32 PLACES = 0x81C081C0, NOTHING = 0x80008000;

// Eight weights in a word: those of three pairs are shifted or turned to their places together, those of the fourth are
// there but for their lowest bits.
__device__ __forceinline__ void unpack_word(u32 (&words)[4], u32 word) {
  words[0] = word << 6 & PLACES;
  words[1] = __funnelshift_l(word, word, 28) & PLACES;
  words[2] = word << 2 & PLACES;
  words[3] = word & 0x81808180 | word >> 8 & 0x00400040;
}

#define LOADS_ROUNDS

struct Round {
  uint4 numbers[DEPTH / 64];
  u32 scales[DEPTH / 32][2];  // of two rows, eight apart
};

struct Reader {
  u32 numbers, powers;  // of this thread, behind where a unit begins
  __device__ __forceinline__ Reader(u32 thread)
      : numbers(kept(thread / 32 * (NUMBER_BYTES / 4) + thread % 32 * 16)), powers(kept(NUMBER_BYTES + thread / 4 * 8)) {}

  __device__ __forceinline__ Round load(u32 unit) const {
    Round found;
#pragma unroll
    for (u32 half = 0; half < DEPTH / 64; half++) found.numbers[half] = load_sixteen(unit + numbers + half * 512);
#pragma unroll
    for (u32 row = 0; row < 2; row++) {
      u32 bytes = load_word(unit + powers + row * 4);
#pragma unroll
      for (u32 group = 0; group < DEPTH / 32; group++) {
        found.scales[group][row] = __byte_perm(bytes, 0, 0x4040 | group * 0x0101) << 7;
      }
    }
    return found;
  }
};

__device__ __forceinline__ void unpack_steps(u32 (&words)[STEPS][4], const Round& round, u32 first_step) {
#pragma unroll
  for (u32 step = 0; step < STEPS; step++) {
    u32 at = first_step + step;
    const uint4& four = round.numbers[at / 4];
    unpack_word(words[step], at % 4 == 0 ? four.x : at % 4 == 1 ? four.y : at % 4 == 2 ? four.z : four.w);
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      words[step][i] = multiply_add_pairs(words[step][i], round.scales[at / 2][i % 2], NOTHING);
    }
  }
}

#elif CODE == 5

constexpr u32 DEPTH = 128;
constexpr u32 LOW_BYTES = 64 * DEPTH / 2, HIGH_BYTES = 64 * DEPTH * HIGH / 8;
constexpr u32 KINDS = OFFSETS ? 2 : 1;
constexpr bool TWO_LEVELS = SCALE_TYPE == 3;
constexpr u32 VALUE_BYTES = SCALE_TYPE == 2 ? 4 : 2;
constexpr u32 SCALE_BYTES = TWO_LEVELS ? KINDS * 64 * (2 + SCALES) : SCALES * KINDS * 64 * VALUE_BYTES;
constexpr u32 UNIT_BYTES = LOW_BYTES + HIGH_BYTES + SCALE_BYTES;
constexpr bool HAS_FACTORS = false;
// A whole number is a subnormal float32 wherever it lies in a word's lower 24 bits: in units of 2^-133 from bit 16 on. A
// float8's bits are one that is 2^120 times too small. Scales are 2^73 or 2^60 times as large, so that all weights are
// 2^60 times too small: float32 is exact there, and bfloat16 rounds as it would in place.
constexpr float TAKEN_OFF = 1.152921504606847e18f;                             // 2^60
constexpr float SCALED_UP = FLOAT8 ? 1.152921504606847e18f : 9.44473296573929e21f;  // 2^60, 2^73
constexpr float OFFSETS_DOWN = 8.673617379884035e-19f;                         // 2^-60
// Whether numbers are taken where they lie: of the row above from bits 0 and 16 on, of the one below from 4 and 20.
constexpr bool IN_PLACE = HIGH == 0 && !TABLE && !FLOAT8;

// 2^88, as scales are 2^73 times as large; of the row below, whose numbers may be sixteen times as large; and -2^-45, of
// offsets.
constexpr u32 BYTES_FROM[3] = {0x6B800000, IN_PLACE ? 0x69800000 : 0x6B800000, 0xA9000000};

#define LOADS_ROUNDS

struct Round {
  u32 numbers, above, scales;    // where they are
  u32 tops, low_tops;  // float16 of both rows, where there are two levels
  u32 from[3];
};

struct Reader {
  u32 numbers, above, scales;  // of this thread, behind where a unit begins
  u32 from[3];                 // in registers, where instructions have no room for a second constant
  __device__ __forceinline__ Reader(u32 thread) {
    u32 lane = thread % 32, warp = thread / 32;
    numbers = kept(warp * (LOW_BYTES / 4) + lane * 16);
    above = HIGH == 1 || HIGH == 2 ? kept(LOW_BYTES + warp * (256 * HIGH) + lane * (8 * HIGH)) : numbers + LOW_BYTES;
    scales = kept(LOW_BYTES + HIGH_BYTES + thread / 4 * (2 * (TWO_LEVELS ? 2 : VALUE_BYTES)));
#pragma unroll
    for (u32 i = 0; i < 3; i++) from[i] = TWO_LEVELS ? kept(BYTES_FROM[i]) : 0;
  }

  __device__ __forceinline__ Round load(u32 unit) const {
    Round found{unit + numbers, unit + above, unit + scales, 0, 0, {from[0], from[1], from[2]}};
    if constexpr (TWO_LEVELS) found.tops = load_word(found.scales);
    if constexpr (TWO_LEVELS && OFFSETS) found.low_tops = load_word(found.scales + 128);
    return found;
  }
};

// Of a group of a row. Factors: of numbers from bits 0 (or 4) on, and from 16 (or 20) on.
struct Scale {
  float factors[2], offset;
};

// Of two values of sixteen bits.
__device__ __forceinline__ float float_of(u32 both, u32 half) {
  if constexpr (SCALE_TYPE == 1) return __uint_as_float(half ? both & 0xFFFF0000 : both << 16);
  return half ? floats_of_halves(both).y : floats_of_halves(both).x;
}

// A signed byte of a word times `top`, a float16, times a power of two: exact at every step. The byte, 128 added, counts
// ones behind 2^15; all of that is as many times as large as `from`, a power of two, is as 2^15.
__device__ __forceinline__ float scaled_byte(u32 bytes, u32 at, float top, u32 held_from, u32 from) {
  float byte = __uint_as_float(__byte_perm(bytes ^ 0x80808080, held_from, 0x7604 | at << 4));
  return fmaf(byte, top, -1.00390625f * __uint_as_float(from) * top);
}

// Of a group in a round, and of the two rows that a thread has.
__device__ __forceinline__ void load_scales(Scale (&found)[2], const Round& round, u32 group) {
  u32 first = 0, first_offsets = 0, second = 0, second_offsets = 0;  // the second's only of float32
  if constexpr (TWO_LEVELS) {
    u32 from = round.scales + KINDS * 128 + group / 2 * (KINDS * 128);
    first = load_word(from);
    if constexpr (OFFSETS) first_offsets = load_word(from + 128);
  } else {
    constexpr u32 FURTHER = 64 * VALUE_BYTES;
    u32 from = round.scales + group * (KINDS * FURTHER);
    first = load_word(from);
    if constexpr (OFFSETS) first_offsets = load_word(from + FURTHER);
    if constexpr (SCALE_TYPE == 2) second = load_word(from + 4);
    if constexpr (SCALE_TYPE == 2 && OFFSETS) second_offsets = load_word(from + FURTHER + 4);
  }
#pragma unroll
  for (u32 row = 0; row < 2; row++) {
    constexpr float UNIT = 9.183549615799121e-41f;  // 2^-133
    float further = IN_PLACE && row ? 16.0f : 1.0f, up = SCALED_UP / further, unit = UNIT * further;
    float factor, offset = 0.0f;
    if constexpr (TWO_LEVELS) {
      u32 at = row * 2 + group % 2;
      factor = scaled_byte(first, at, float_of(round.tops, row), round.from[row], BYTES_FROM[row]);
      if constexpr (OFFSETS) {
        offset = scaled_byte(first_offsets, at, float_of(round.low_tops, row), round.from[2], BYTES_FROM[2]);
      }
    } else if constexpr (SCALE_TYPE == 2) {
      factor = __uint_as_float(row ? second : first) * up;
      if constexpr (OFFSETS) offset = __uint_as_float(row ? second_offsets : first_offsets);
    } else {
      factor = float_of(first, row) * up;
      if constexpr (OFFSETS) offset = float_of(first_offsets, row);
    }
    if constexpr (OFFSETS == 1 && !TWO_LEVELS) offset *= OFFSETS_DOWN;
    if constexpr (OFFSETS == 2) offset = -(offset * factor) * unit;
    if constexpr (OFFSETS == 0) offset = factor * (-(FLOAT8 ? 0.0f : (float)MIDDLE) * unit);
    found[row] = {{factor * 65536.0f, factor}, offset};
  }
}

// Two numbers of four bits, in the halves of a word, as the bytes that they stand for: of the first eight or of the last.
__device__ __forceinline__ u32 looked_up(u32 both) {
  u32 places = (both & 0x7) | (both >> 8 & 0x700), last = (both >> 3 & 0x00010001) * 0xFF;
  u32 low = __byte_perm(ENTRIES_0, ENTRIES_1, places), high = __byte_perm(ENTRIES_2, ENTRIES_3, places);
  return ((low & ~last) | (high & last)) & 0x00FF00FF;
}

// Two weights of a row: neighbours, whose numbers lie in the halves of a word.
__device__ __forceinline__ u32 two_weights(u32 numbers, const Scale& scale) {
  float first = fmaf(__uint_as_float(numbers << 16), scale.factors[1], scale.offset);
  float second = fmaf(__uint_as_float(numbers & 0xFFFF0000), scale.factors[1], scale.offset);
  return packed(first, second);
}

// Two whose numbers are taken as they lie: under a mask, and under the same sixteen bits on.
__device__ __forceinline__ u32 masked_weights(u32 word, u32 mask, const Scale& scale) {
  float first = fmaf(__uint_as_float(word & mask), scale.factors[0], scale.offset);
  float second = fmaf(__uint_as_float(word & mask << 16), scale.factors[1], scale.offset);
  return packed(first, second);
}

// Those whose numbers are bytes of a word: at 0 and 2, or at 1 and 3.
__device__ __forceinline__ u32 weights_of_bytes(u32 word, u32 at, const Scale& scale) {
  float first = fmaf(__uint_as_float(__byte_perm(word, 0, 0x4044 | at << 8)), scale.factors[1], scale.offset);
  float second = fmaf(__uint_as_float(__byte_perm(word, 0, 0x4244 + (at << 8))), scale.factors[1], scale.offset);
  return packed(first, second);
}

__device__ __forceinline__ u32 moved(u32 word, u32 from, u32 to) {
  return from < to ? word << (to - from) : word >> (from - to);
}

// The high bits of two neighbours, and of those eight inputs on, above the lowest four of each byte. In the halves of
// `above` they lie from these bits on.
__device__ __forceinline__ u32 with_high_bits(u32 lows, u32 above, u32 from, u32 from_further) {
  constexpr u32 MASK = ((1 << HIGH) - 1) * 0x00100010;
  u32 high = moved(above, from, 4) & MASK | moved(above, from_further, 12) & MASK << 8;
  return lows & 0x0F0F0F0F | high;
}

__device__ __forceinline__ void unpack_steps(u32 (&words)[STEPS][4], const Round& round, u32 first_step) {
  uint4 numbers = load_sixteen(round.numbers + first_step / 4 * 512);
  u32 lows[4] = {numbers.x, numbers.y, numbers.z, numbers.w};
  u32 highs[4] = {0, 0, 0, 0};  // of each step; of two bits, of each two steps; of one, of each four
  if constexpr (HIGH == 4 || HIGH == 2) {
    uint4 above = load_sixteen(round.above + (HIGH == 4 ? first_step / 4 * 512 : 0));
    highs[0] = above.x, highs[1] = above.y, highs[2] = above.z, highs[3] = above.w;
  } else if constexpr (HIGH == 1) {
    highs[0] = load_word(round.above + first_step / 4 * 4);
  }
  Scale scale[2];
#pragma unroll
  for (u32 step = 0; step < STEPS; step++) {
    u32 at = first_step + step, group = at * SCALES / (DEPTH / 16), low = lows[at % 4];
    if (step == 0 || group != (at - 1) * SCALES / (DEPTH / 16)) load_scales(scale, round, group);
    if constexpr (TABLE) {
#pragma unroll
      for (u32 i = 0; i < 4; i++) words[step][i] = two_weights(looked_up(low >> 4 * i & 0x000F000F), scale[i % 2]);
    } else if constexpr (IN_PLACE) {
#pragma unroll
      for (u32 i = 0; i < 4; i++) {
        words[step][i] = masked_weights(i < 2 ? low : low >> 8, i % 2 ? 0xF0 : 0xF, scale[i % 2]);
      }
    } else {
#pragma unroll
      for (u32 row = 0; row < 2; row++) {
        u32 bytes, own = row ? low >> 4 : low;
        if constexpr (HIGH == 4) {
          bytes = own & 0x0F0F0F0F | (row ? highs[at % 4] : highs[at % 4] << 4) & 0xF0F0F0F0;
        } else {
          u32 from = (HIGH == 2 ? at % 2 * 8 : at % 4 * 4) + row * HIGH;
          bytes = with_high_bits(own, highs[HIGH == 2 ? at / 2 : 0], from, from + 2 * HIGH);
        }
        if constexpr (FLOAT8) {
          words[step][row] = two_weights(bytes << 8 & 0x80008000 | bytes << 4 & 0x07F007F0, scale[row]);
          words[step][row + 2] = two_weights(bytes & 0x80008000 | bytes >> 4 & 0x07F007F0, scale[row]);
        } else {
          words[step][row] = weights_of_bytes(bytes, 0, scale[row]);
          words[step][row + 2] = weights_of_bytes(bytes, 1, scale[row]);
        }
      }
    }
  }
}

#else

constexpr u32 DEPTH = 128;
constexpr u32 NUMBER_BYTES = 64 * DEPTH / 2;
constexpr u32 SCALE_BYTES = 64 * 2;  // of one scale of every row
constexpr u32 UNIT_BYTES = NUMBER_BYTES + SCALES * SCALE_BYTES * (OFFSETS ? 2 : 1);
constexpr bool HAS_FACTORS = false;
// A number of four bits is a subnormal bfloat16 as it lies there, in units of 2^-133; scales are held 2^73 times as large
// as they are, so that products with them are in the middle of what bfloat16 has. 2^60.
constexpr float TAKEN_OFF = 1.152921504606847e18f;
constexpr u32 LESS_EIGHT[2] = {0x80088008, 0x80808080}, NOTHING = 0x80008000, A_SIXTEENTH = 0x3D803D80;

#define LOADS_ROUNDS

// Two scales of a group are those of two rows, eight apart. A number of the lower one stands four bits higher in its
// word than one of the upper, and is taken as it lies: sixteen times as large, with a sixteenth of its scale.
struct Round {
  uint4 numbers[DEPTH / 64];
  u32 scales[SCALES][2], offsets[SCALES][2];
};

struct Reader {
  u32 numbers, scales;  // of this thread, behind where a unit begins
  __device__ __forceinline__ Reader(u32 thread)
      : numbers(kept(thread / 32 * (NUMBER_BYTES / 4) + thread % 32 * 16)),
        scales(kept(NUMBER_BYTES + thread / 4 * 4)) {}

  __device__ __forceinline__ Round load(u32 unit) const {
    Round found;
#pragma unroll
    for (u32 half = 0; half < DEPTH / 64; half++) found.numbers[half] = load_sixteen(unit + numbers + half * 512);
#pragma unroll
    for (u32 group = 0; group < SCALES; group++) {
      u32 from = unit + scales + group * SCALE_BYTES * (OFFSETS ? 2 : 1);
      u32 both = load_word(from), both_offsets = OFFSETS ? load_word(from + SCALE_BYTES) : 0;
      found.scales[group][0] = __byte_perm(both, 0, 0x1010);
      found.scales[group][1] = multiply_add_pairs(__byte_perm(both, 0, 0x3232), A_SIXTEENTH, NOTHING);
#pragma unroll
      for (u32 row = 0; row < 2; row++) {
        found.offsets[group][row] = OFFSETS ? __byte_perm(both_offsets, 0, row ? 0x3232 : 0x1010)
                                            : multiply_add_pairs(found.scales[group][row], LESS_EIGHT[row], NOTHING);
      }
    }
    return found;
  }
};

__device__ __forceinline__ void unpack_steps(u32 (&words)[STEPS][4], const Round& round, u32 first_step) {
#pragma unroll
  for (u32 step = 0; step < STEPS; step++) {
    u32 at = first_step + step, group = at * SCALES / (DEPTH / 16);
    const uint4& four = round.numbers[at / 4];
    u32 word = at % 4 == 0 ? four.x : at % 4 == 1 ? four.y : at % 4 == 2 ? four.z : four.w;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      u32 row = i % 2, both = (i < 2 ? word : word >> 8) & (row ? 0x00F000F0 : 0x000F000F);
      words[step][i] = multiply_add_pairs(both, round.scales[group][row], round.offsets[group][row]);
    }
  }
}

#endif
