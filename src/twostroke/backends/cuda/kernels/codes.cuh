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

__device__ __forceinline__ void unpack_steps(u32 (&words)[STEPS][4], u32 unit, u32 thread, u32 first_step) {
  u32 from = unit + thread / 32 * (UNIT_BYTES / 4) + thread % 32 * 16;
  uint4 codes = load_sixteen(from + 1024);
  u32 of_step[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
  for (u32 step = 0; step < STEPS; step += 2) {
    uint4 numbers = load_sixteen(from + (first_step + step) / 2 * 512);
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
// A float8's exponent and mantissa are the lowest and the highest bits of a bfloat16's: subnormal or hardly more, which
// tensor cores take as they are. 2^120.
constexpr float TAKEN_OFF = 1.329227995784916e36f;

// The upper bytes of both halves of a word.
__device__ __forceinline__ u32 two_weights(u32 word) { return word & 0x80008000 | word >> 4 & 0x07F007F0; }

// A row of a round is 128 bytes, and the copy engine has spread its pieces of sixteen over the banks. Of a gated unit,
// 32 rows of the gate lie ahead of 32 of the other.
__device__ __forceinline__ void unpack_steps(u32 (&words)[STEPS][4], u32 unit, u32 thread, u32 first_step) {
  u32 lane = thread % 32, row = thread / 32 * (GATED ? 8 : 16) + lane / 4;
  u32 from = unit + row * 128 + ((lane % 4 * 2 + first_step / 4 ^ row % 8) << 4);
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
constexpr float TAKEN_OFF = 1.329227995784916e36f;  // as of code 8

__device__ __forceinline__ u32 two_weights(u32 word) { return word & 0x80008000 | word >> 4 & 0x07F007F0; }

__device__ __forceinline__ void four_words(u32 (&words)[4], u32 above, u32 below) {
  words[0] = two_weights(above);
  words[1] = two_weights(below);
  words[2] = two_weights(above << 8);
  words[3] = two_weights(below << 8);
}

__device__ __forceinline__ void unpack_steps(u32 (&words)[STEPS][4], u32 unit, u32 thread, u32 first_step) {
  u32 from = unit + thread / 32 * (UNIT_BYTES / 4) + thread % 32 * 16;
#pragma unroll
  for (u32 step = 0; step < STEPS; step += 2) {
    uint4 numbers = load_sixteen(from + (first_step + step) / 2 * 512);
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

__device__ __forceinline__ void unpack_steps(u32 (&words)[STEPS][4], u32 unit, u32 thread, u32 first_step) {
  u32 lane = thread % 32, warp = thread / 32;
  uint4 numbers = load_sixteen(unit + warp * (NUMBER_BYTES / 4) + first_step / 4 * 512 + lane * 16);
  u32 of_step[4] = {numbers.x, numbers.y, numbers.z, numbers.w};
  u32 from = unit + NUMBER_BYTES + (warp * 8 + lane / 4) * 8;
  u32 powers[2] = {load_word(from), load_word(from + 4)};
  u32 scales[2];
#pragma unroll
  for (u32 step = 0; step < STEPS; step++) {
    u32 at = first_step + step;
    if (step == 0 || at % 2 == 0) {
#pragma unroll
      for (u32 half = 0; half < 2; half++) scales[half] = (powers[half] >> at / 2 * 8 & 0xFF) * 0x00800080;
    }
    unpack_word(words[step], of_step[at % 4]);
#pragma unroll
    for (u32 i = 0; i < 4; i++) words[step][i] = multiply_add_pairs(words[step][i], scales[i % 2], NOTHING);
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
// A whole number is a subnormal float32 as it lies in the upper half of a word, in units of 2^-133; a float8's bits are one
// that is 2^120 times too small. Scales are 2^73 or 2^60 times as large, so that all weights are 2^60 times too small:
// float32 is exact there, and bfloat16 rounds as it would in place.
constexpr float TAKEN_OFF = 1.152921504606847e18f;                             // 2^60
constexpr float SCALED_UP = FLOAT8 ? 1.152921504606847e18f : 9.44473296573929e21f;  // 2^60, 2^73
constexpr float OFFSETS_DOWN = 8.673617379884035e-19f;                         // 2^-60

struct Scale {
  float factor, offset;
};

__device__ __forceinline__ float float_of_half(u32 bits) {
  return __uint_as_float((bits & 0x8000) << 16 | (bits & 0x7FFF) << 13) * 5.192296858534828e33f;  // 2^112
}

// Of two halves of a word.
__device__ __forceinline__ float float_of(u32 both, u32 half) {
  if constexpr (SCALE_TYPE == 1) return __uint_as_float(half ? both & 0xFFFF0000 : both << 16);
  return float_of_half(half ? both >> 16 : both & 0xFFFF);
}

// Of four bytes, as 2^23 has them in its mantissa.
__device__ __forceinline__ float signed_byte(u32 bytes, u32 at) {
  return __uint_as_float(__byte_perm(bytes ^ 0x80808080, 0x4B000000, 0x7540 | at)) - 8388736.0f;
}

// Of a group in a round, and of the two rows that a thread has. `rows`: where they stand among a unit's 64.
__device__ __forceinline__ void load_scales(Scale (&found)[2], u32 scales, u32 rows, u32 group) {
  if constexpr (TWO_LEVELS) {
    u32 tops = load_word(scales + rows * 2), low_tops = OFFSETS ? load_word(scales + 128 + rows * 2) : 0;
    u32 from = scales + KINDS * 128 + group / 2 * (KINDS * 128) + rows * 2;
    u32 bytes = load_word(from), low_bytes = OFFSETS ? load_word(from + 128) : 0;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
      found[half].factor = float_of_half(tops >> half * 16 & 0xFFFF) * SCALED_UP * signed_byte(bytes, half * 2 + group % 2);
      found[half].offset = float_of_half(low_tops >> half * 16 & 0xFFFF) * OFFSETS_DOWN;
      found[half].offset *= -signed_byte(low_bytes, half * 2 + group % 2);
    }
  } else {
    u32 from = scales + (group * KINDS * 64 + rows) * VALUE_BYTES;
    constexpr u32 FURTHER = 64 * VALUE_BYTES;
    u32 both = load_word(from), both_offsets = OFFSETS ? load_word(from + FURTHER) : 0;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
      if constexpr (SCALE_TYPE == 2) {
        found[half].factor = __uint_as_float(half ? load_word(from + 4) : both);
        found[half].offset = OFFSETS ? __uint_as_float(half ? load_word(from + FURTHER + 4) : both_offsets) : 0.0f;
      } else {
        found[half].factor = float_of(both, half);
        found[half].offset = OFFSETS ? float_of(both_offsets, half) : 0.0f;
      }
      found[half].factor *= SCALED_UP;
      if constexpr (OFFSETS == 1) found[half].offset *= OFFSETS_DOWN;
    }
  }
  if constexpr (OFFSETS != 1) {
    constexpr float UNIT = 9.183549615799121e-41f;  // 2^-133
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
      float zero = OFFSETS == 2 ? found[half].offset : FLOAT8 ? 0.0f : (float)MIDDLE;
      found[half].offset = -(zero * found[half].factor) * UNIT;
    }
  }
}

// Two numbers of four bits, in the halves of a word, as the bytes that they stand for: of the first eight or of the last.
__device__ __forceinline__ u32 looked_up(u32 both) {
  u32 places = (both & 0x7) | (both >> 8 & 0x700), last = (both >> 3 & 0x00010001) * 0xFF;
  u32 low = __byte_perm(ENTRIES_0, ENTRIES_1, places), high = __byte_perm(ENTRIES_2, ENTRIES_3, places);
  return ((low & ~last) | (high & last)) & 0x00FF00FF;
}

// Two weights of a row: neighbours, in the halves of a word.
__device__ __forceinline__ u32 two_weights(u32 numbers, const Scale& scale) {
  if constexpr (FLOAT8) numbers = (numbers & 0x00800080) << 8 | (numbers & 0x007F007F) << 4;
  float first = fmaf(__uint_as_float(numbers << 16), scale.factor, scale.offset);
  float second = fmaf(__uint_as_float(numbers & 0xFFFF0000), scale.factor, scale.offset);
  return packed(first, second);
}

__device__ __forceinline__ void unpack_steps(u32 (&words)[STEPS][4], u32 unit, u32 thread, u32 first_step) {
  u32 lane = thread % 32, warp = thread / 32, rows = (warp * 8 + lane / 4) * 2;
  u32 of_thread = warp * (LOW_BYTES / 4) + first_step / 4 * 512 + lane * 16;
  uint4 numbers = load_sixteen(unit + of_thread);
  u32 lows[4] = {numbers.x, numbers.y, numbers.z, numbers.w};
  u32 highs[4] = {0, 0, 0, 0};  // of each step; of two bits, of each two steps; of one, of each four
  if constexpr (HIGH == 4) {
    uint4 above = load_sixteen(unit + LOW_BYTES + of_thread);
    highs[0] = above.x, highs[1] = above.y, highs[2] = above.z, highs[3] = above.w;
  } else if constexpr (HIGH == 2) {
    uint4 above = load_sixteen(unit + LOW_BYTES + warp * 512 + lane * 16);
    highs[0] = above.x, highs[1] = above.y, highs[2] = above.z, highs[3] = above.w;
  } else if constexpr (HIGH == 1) {
    highs[0] = load_word(unit + LOW_BYTES + warp * 256 + lane * 8 + first_step / 4 * 4);
  }
  Scale scale[2];
#pragma unroll
  for (u32 step = 0; step < STEPS; step++) {
    u32 at = first_step + step, group = at * SCALES / (DEPTH / 16);
    if (step == 0 || group != (at - 1) * SCALES / (DEPTH / 16)) {
      load_scales(scale, unit + LOW_BYTES + HIGH_BYTES, rows, group);
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      u32 both = lows[at % 4] >> 4 * i & 0x000F000F;
      if constexpr (HIGH == 4) both |= (highs[at % 4] >> 4 * i & 0x000F000F) << 4;
      if constexpr (HIGH == 2) both |= (highs[at / 2] >> (at % 2 * 8 + 2 * i) & 0x00030003) << 4;
      if constexpr (HIGH == 1) both |= (highs[0] >> (at % 4 * 4 + i) & 0x00010001) << 4;
      if constexpr (TABLE) both = looked_up(both);
      words[step][i] = two_weights(both, scale[i % 2]);
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
constexpr u32 LESS_EIGHT = 0x80088008, NOTHING = 0x80008000;

__device__ __forceinline__ void unpack_steps(u32 (&words)[STEPS][4], u32 unit, u32 thread, u32 first_step) {
  u32 lane = thread % 32, warp = thread / 32;
  uint4 numbers = load_sixteen(unit + warp * (NUMBER_BYTES / 4) + first_step / 4 * 512 + lane * 16);
  u32 of_step[4] = {numbers.x, numbers.y, numbers.z, numbers.w};
  u32 scales[2], offsets[2];
#pragma unroll
  for (u32 step = 0; step < STEPS; step++) {
    u32 group = (first_step + step) * SCALES / (DEPTH / 16);
    if (step == 0 || group != (first_step + step - 1) * SCALES / (DEPTH / 16)) {
      u32 from = unit + NUMBER_BYTES + group * SCALE_BYTES * (OFFSETS ? 2 : 1) + (warp * 8 + lane / 4) * 4;
      u32 both = load_word(from), both_offsets = OFFSETS ? load_word(from + SCALE_BYTES) : 0;
#pragma unroll
      for (u32 half = 0; half < 2; half++) {
        scales[half] = __byte_perm(both, 0, half ? 0x3232 : 0x1010);
        offsets[half] = OFFSETS ? __byte_perm(both_offsets, 0, half ? 0x3232 : 0x1010)
                                : multiply_add_pairs(scales[half], LESS_EIGHT, NOTHING);
      }
    }
    u32 word = of_step[first_step % 4 + step];
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      words[step][i] = multiply_add_pairs(word >> 4 * i & 0x000F000F, scales[i % 2], offsets[i % 2]);
    }
  }
}

#endif
