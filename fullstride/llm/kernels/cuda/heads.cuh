// A query's or key's head, spread over a warp: norm and rotary embedding as the plain kernels round them.

constexpr int HALF = HEAD_DIM / 2, GROUP = HEADS / KV_HEADS;
// Words of half a head, and of these a lane's, of two elements each.
constexpr int WORDS = HALF / 2, LANE_WORDS = (WORDS + 31) / 32, PER = 2 * LANE_WORDS;
// Of a token in qkv and in the pool.
constexpr int WIDE = (HEADS + 2 * KV_HEADS) * HEAD_DIM, ROW = KV_HEADS * HEAD_DIM;

// An element of the pool: with FP8 an e4m3 code, else bf16. Two of them, and how many are 16 bytes.
#if FP8
typedef u8 Kept;
typedef u16 KeptPair;
#else
typedef u16 Kept;
typedef u32 KeptPair;
#endif
constexpr int PIECE = 16 / sizeof(Kept);
// The nearest code, for GPUs that have no instruction for it: below 2^-6 a code is a multiple of 2^-9, and from there on what
// is left of the number's exponent and mantissa.
DEVICE u32 nearest_code(float x) {
  const u32 bits = float_bits(x), size = bits & 0x7fffffffu, sign = bits >> 24 & 0x80;
  if (size >= 0x43e00000u) return sign | (size > 0x7f800000u ? 0x7f : 0x7e);
  if (size < 0x3c800000u) return sign | (float_bits(bits_float(size) * 512.f + 8388608.f) & 0xff);
  return sign | (((size + 0x7ffffu + (size >> 20 & 1)) >> 20) - (120 << 3));
}
// Of two bf16. Two conversions, as elsewhere: a key is rounded to bf16 before it becomes a code.
DEVICE KeptPair kept(u32 word, float inverse) {
  if (!FP8) return (KeptPair)word;
  const float first = first_of(word) * inverse, second = second_of(word) * inverse;
  if (!CONVERTS) return (KeptPair)(nearest_code(first) | nearest_code(second) << 8);
  return (KeptPair)pack_e4m3(first, second);
}
// Of four codes in a word, bf16 of bytes 0 and 2, and of bytes 1 and 3.
DEVICE u32 even(u32 codes, u32 factors) { return e4m3_high(codes << 8, factors); }
DEVICE u32 odd(u32 codes, u32 factors) { return e4m3_high(codes, factors); }
// From a head's first key or value to the factor of one of a block's, in bytes: factors are behind all codes, those of a head in
// a block one after the other (`fp8_pool.py`).
DEVICE u64 factor_at(int kv, u32 block, int token) {
  return (u64)block * (2 * KV_HEADS * BLOCK) + ((u64)CODED * ROW + kv * (2 * BLOCK - HEAD_DIM) + token * 2);
}
DEVICE u32 twice(u32 factor) { return low_halves(factor, factor); }
// Of eight words' 16 bf16 a lane's share as codes come: 4 t, 4 t + 2 and 4 t + 1, 4 t + 3, where t = lane % 4. A sum over
// them does not mind, if both factors are in that order.
DEVICE uint2 quad(const u32* words) {
  const u32 x = words[lane() % 4 * 2], y = words[lane() % 4 * 2 + 1];
  return {low_halves(x, y), high_halves(x, y)};
}

DEVICE float of_bf16(u16 x) { return bits_float((u32)x << 16); }
DEVICE float as_bf16(float x) { return first_of(pack(x, 0.f)); }

// A lane's elements: words lane, lane + 32, ... of the first half, and those that they turn with; zeros behind them.
struct Head {
  float a[PER], b[PER];
};
DEVICE bool in_half(int word) { return WORDS % 32 == 0 || word < WORDS; }

DEVICE Head head_at(const u16* from) {
  Head x;
#pragma unroll
  for (int j = 0; j < PER; j += 2) {
    const int word = lane() + j * 16;
    const u32 a = in_half(word) ? ((const u32*)from)[word] : 0, b = in_half(word) ? ((const u32*)from)[word + WORDS] : 0;
    x.a[j] = first_of(a), x.a[j + 1] = second_of(a), x.b[j] = first_of(b), x.b[j + 1] = second_of(b);
  }
  return x;
}
DEVICE float sum_lanes(float x) {
  for (int mask = 16; mask; mask >>= 1) x += shuffle_xor(x, mask);
  return x;
}
DEVICE float max_lanes(float x) {
  for (int mask = 16; mask; mask >>= 1) x = max_of(x, shuffle_xor(x, mask));
  return x;
}
// Of a key or value: the scale that makes its largest element the largest code, times 2^120, in bf16.
DEVICE u32 factor_of(const Head& x) {
  float most = 0;
  for (int j = 0; j < PER; j++) most = max_of(most, max_of(max_of(x.a[j], -x.a[j]), max_of(x.b[j], -x.b[j])));
  const float scale = as_bf16(max_lanes(most)) * (1 / 448.f);
  return pack(max_of(scale < 255 ? scale : 255, 0x1p-100f) * 0x1p120f, 0);
}
DEVICE float inverse_of(u32 factor) { return 1 / (first_of(factor) * 0x1p-120f); }
// x / rms(x) * weight.
DEVICE Head normalised(Head x, const Head& weight) {
  float sum = 0;
  for (int j = 0; j < PER; j++) sum += x.a[j] * x.a[j] + x.b[j] * x.b[j];
  float scale = rsqrt_of(sum_lanes(sum) * (1.f / HEAD_DIM) + (float)(EPS));
  for (int j = 0; j < PER; j++) {
    x.a[j] = as_bf16(as_bf16(x.a[j] * scale) * weight.a[j]);
    x.b[j] = as_bf16(as_bf16(x.b[j] * scale) * weight.b[j]);
  }
  return x;
}
// Cosines and sines of a lane's elements.
DEVICE Head angles(const float* cos, const float* sin) {
  Head x;
#pragma unroll
  for (int j = 0; j < PER; j++) {
    const int word = lane() + j / 2 * 32;
    x.a[j] = in_half(word) ? cos[2 * word + j % 2] : 0, x.b[j] = in_half(word) ? sin[2 * word + j % 2] : 0;
  }
  return x;
}
// RoPE (arXiv:2104.09864) in the half-split order.
DEVICE Head rotated(const Head& x, const Head& angle) {
  Head y;
  for (int j = 0; j < PER; j++) {
    y.a[j] = x.a[j] * angle.a[j] - x.b[j] * angle.b[j];
    y.b[j] = x.b[j] * angle.a[j] + x.a[j] * angle.b[j];
  }
  return y;
}
DEVICE void store_head(const Head& x, u16* to) {
#pragma unroll
  for (int j = 0; j < PER; j += 2) {
    const int word = lane() + j * 16;
    if (!in_half(word)) continue;
    ((u32*)to)[word] = pack(x.a[j], x.a[j + 1]), ((u32*)to)[word + WORDS] = pack(x.b[j], x.b[j + 1]);
  }
}
// As the pool has it, which is also how its own token sees it.
DEVICE Head as_kept(Head x, u32 factor) {
  const float inverse = inverse_of(factor);
  for (int j = 0; j < PER; j++) {
    const u32 pair = kept(pack(x.a[j], x.b[j]), inverse), both = e4m3_high(low_halves(pair << 8, pair), twice(factor));
    x.a[j] = first_of(both), x.b[j] = second_of(both);
  }
  return x;
}
// A key or value into a slot of the pool; `first` is its head's in the first one.
DEVICE void store_kept(const Head& x, Kept* first, int kv, u32 slot) {
  const u32 factor = FP8 ? factor_of(x) : 0;
  const float inverse = FP8 ? inverse_of(factor) : 0;
  KeptPair* to = (KeptPair*)(first + (u64)slot * ROW);
#pragma unroll
  for (int j = 0; j < PER; j += 2) {
    const int word = lane() + j * 16;
    if (!in_half(word)) continue;
    to[word] = kept(pack(x.a[j], x.a[j + 1]), inverse);
    to[word + WORDS] = kept(pack(x.b[j], x.b[j + 1]), inverse);
  }
  if (FP8 && lane() == 0) *(u16*)(first + factor_at(kv, slot / BLOCK, slot % BLOCK)) = (u16)factor;
}
// What the softmax takes of a product of a query and a key, to base 2; the cap is that of Gemma 2 (arXiv:2408.00118).
DEVICE float score_of(float product) {
  const float x = product * (float)(SCALE), most = (float)(CAP) * 1.4426950408889634f;
  if (CAP == 0) return x;
  return most * (1 - 2 / (1 + exp2_of(x * (2 * 1.4426950408889634f) / most)));
}
