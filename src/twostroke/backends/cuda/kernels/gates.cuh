// What becomes of a gate and what it lets through. GATED: 1 SiLU, 2 GELU (tanh), 3 clamped: at GATE_LIMIT, its slope
// GATE_ALPHA, both in thousandths.

__device__ __forceinline__ float gated(float gate, float up) {
#if GATED == 3
  constexpr float LIMIT = GATE_LIMIT / 1000.0f, ALPHA = GATE_ALPHA / 1000.0f;
  gate = fminf(gate, LIMIT);
  return gate * __fdividef(1.0f, 1.0f + __expf(-gate * ALPHA)) * (fminf(fmaxf(up, -LIMIT), LIMIT) + 1.0f);
#else
  // gelu's 0.5 * (1 + tanh(z)) is sigmoid(2z): one exponential, and no overflow
  float inner = GATED == 2 ? 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate) : gate;
  return gate * __fdividef(1.0f, 1.0f + __expf(-inner)) * up;
#endif
}
