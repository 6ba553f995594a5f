// A query's or key's head, spread over a warp: norm and rotary embedding as the plain kernels round them.

constexpr int HALF = HEAD_DIM / 2, PER = HEAD_DIM / 64, GROUP = HEADS / KV_HEADS;
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
// Of two bf16. Two conversions, as elsewhere: a key is rounded to bf16 before it becomes a code.
DEVICE KeptPair kept(u32 word) { return FP8 ? (KeptPair)pack_e4m3(first_of(word), second_of(word)) : (KeptPair)word; }
// Of four codes in a word, bf16 of bytes 0 and 2, and of bytes 1 and 3.
DEVICE u32 even(u32 codes) { return e4m3_high(codes << 8); }
DEVICE u32 odd(u32 codes) { return e4m3_high(codes); }
// Of eight words' 16 bf16 a lane's share as codes come: 4 t, 4 t + 2 and 4 t + 1, 4 t + 3, where t = lane % 4. A sum over
// them does not mind, if both factors are in that order.
DEVICE uint2 quad(const u32* words) {
  const u32 x = words[lane() % 4 * 2], y = words[lane() % 4 * 2 + 1];
  return {low_halves(x, y), high_halves(x, y)};
}

DEVICE float of_bf16(u16 x) { return bits_float((u32)x << 16); }
DEVICE float as_bf16(float x) { return first_of(pack(x, 0.f)); }

// A lane's elements: PER * lane + j in the first half, and those that they turn with.
struct Head {
  float a[PER], b[PER];
};

DEVICE Head head_at(const u16* from) {
  Head x;
  if (PER == 2) {
    u32 a = ((const u32*)from)[lane()], b = ((const u32*)from)[lane() + 32];
    x.a[0] = first_of(a), x.a[PER - 1] = second_of(a), x.b[0] = first_of(b), x.b[PER - 1] = second_of(b);
  } else x.a[0] = of_bf16(from[lane()]), x.b[0] = of_bf16(from[lane() + 32]);
  return x;
}
DEVICE float sum_lanes(float x) {
  for (int mask = 16; mask; mask >>= 1) x += shuffle_xor(x, mask);
  return x;
}
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
  for (int j = 0; j < PER; j++) x.a[j] = cos[PER * lane() + j], x.b[j] = sin[PER * lane() + j];
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
  if (PER == 2) {
    ((u32*)to)[lane()] = pack(x.a[0], x.a[PER - 1]), ((u32*)to)[lane() + 32] = pack(x.b[0], x.b[PER - 1]);
  } else to[lane()] = (u16)pack(x.a[0], 0.f), to[lane() + 32] = (u16)pack(x.b[0], 0.f);
}
// As the pool has it, which is also how its own token sees it.
DEVICE Head as_kept(Head x) {
  if (!FP8) return x;
  for (int j = 0; j < PER; j++) {
    const u32 pair = kept(pack(x.a[j], x.b[j])), both = e4m3_high(low_halves(pair << 8, pair));
    x.a[j] = first_of(both), x.b[j] = second_of(both);
  }
  return x;
}
// A key or value into the pool.
DEVICE void store_kept(const Head& x, Kept* to) {
  const KeptPair a = kept(pack(x.a[0], x.a[PER - 1])), b = kept(pack(x.b[0], x.b[PER - 1]));
  if (PER == 2) ((KeptPair*)to)[lane()] = a, ((KeptPair*)to)[lane() + 32] = b;
  else to[lane()] = (Kept)a, to[lane() + 32] = (Kept)b;
}
