// How weights of few bits are held, and how a thread makes bfloat16 of those that it gives to an instruction: of a step
// of 16 inputs, two neighbours in each of two rows eight apart, and the two eight inputs on. CODE:
//   12  bfloat16 in twelve bits (packing.py)
//    8  float8 (e4m3), by rows, in an order of inputs that gives a thread sixteen bytes of a row (eight_bits.py)
//    4  whole numbers of four bits (four_bits.py), with SCALES scales of each row in a round; OFFSETS: and as many offsets
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
