// Attention of a block for one row, one KV head and a part of its context: scores by mma, with the elements of a head in
// an order that lets a lane read 16 bytes of a key at once; values by fp32 sums. Each warp takes tiles of 16 tokens.

// A lane of row g = lane / 4 (a head; after the last one the new key) has elements 32 c + 8 t + e, t = lane % 4.
#define PIECES (HEAD_DIM / 32)
// Values: lanes that share a token, tokens at once, and the reads of a tile.
#define VALUE_LANES (HEAD_DIM / 8)
#define VALUE_TOKENS (32 / VALUE_LANES)
#define VALUE_READS (TILE / VALUE_TOKENS)

struct Tile {
  uint4 keys[2][PIECES];
  uint4 values[VALUE_READS];
};
struct Running {
  float largest, total;
  float out[GROUP][8];
};

DEVICE int value_token(int i) {
  int quad = 4 / VALUE_TOKENS, first = i / (2 * quad), q = i / 2 % quad, odd = i % 2;
  return 8 * first + 2 * (q * VALUE_TOKENS + lane() / VALUE_LANES) + odd;
}

// Keys and values of tokens [start, start + 16) of a sequence, but not from `end` on.
DEVICE void ask(Tile& tile, const u16* pool, const int* table, int kv_head, int start, int end) {
  const u16* values = pool + (u64)SLOTS * KV_HEADS * HEAD_DIM;
#pragma unroll
  for (int j = 0; j < 2; j++) {
    int token = smaller(start + 8 * j + lane() / 4, end - 1);
    u64 slot = (u64)table[token / BLOCK] * BLOCK + token % BLOCK;
    const uint4* from = (const uint4*)(pool + (slot * KV_HEADS + kv_head) * HEAD_DIM) + lane() % 4;
#pragma unroll
    for (int c = 0; c < PIECES; c++) tile.keys[j][c] = load_early(from + 4 * c);
  }
#pragma unroll
  for (int i = 0; i < VALUE_READS; i++) {
    int token = smaller(start + value_token(i), end - 1);
    u64 slot = (u64)table[token / BLOCK] * BLOCK + token % BLOCK;
    tile.values[i] = load_early((const uint4*)(values + (slot * KV_HEADS + kv_head) * HEAD_DIM) + lane() % VALUE_LANES);
  }
}

// Norm and angle of the row that this lane has a part of, rounded to bf16.
DEVICE void turn(const uint4 (&raw)[2 * PIECES], const float* angles, const float* weights, u32 (&words)[4 * PIECES]) {
  float x[8 * PIECES];
#pragma unroll
  for (int i = 0; i < 2 * PIECES; i++) {
    x[4 * i] = bits_float(raw[i].x), x[4 * i + 1] = bits_float(raw[i].y);
    x[4 * i + 2] = bits_float(raw[i].z), x[4 * i + 3] = bits_float(raw[i].w);
  }
  int first = 8 * (lane() % 4);
#if QK_NORM
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8 * PIECES; i++) sum += x[i] * x[i];
  sum += shuffle_xor(sum, 1);
  sum += shuffle_xor(sum, 2);
  float scale = rsqrt_of(sum / HEAD_DIM + float(RMS_EPS));
#pragma unroll
  for (int i = 0; i < 8 * PIECES; i++) x[i] *= scale * weights[i / 8 * 32 + first + i % 8];
#endif
  constexpr int half = 4 * PIECES;
#pragma unroll
  for (int i = 0; i < half; i++) {
    int at = i / 8 * 32 + first + i % 8;
    float cos = angles[at], sin = angles[HEAD_DIM / 2 + at], a = x[i], b = x[i + half];
    x[i] = a * cos - b * sin;
    x[i + half] = b * cos + a * sin;
  }
#pragma unroll
  for (int i = 0; i < 4 * PIECES; i++) words[i] = pack(x[2 * i], x[2 * i + 1]);
}

// Take the first `count` tokens of a tile into the running softmax.
DEVICE void take(Running& run, const u32 (&q)[4 * PIECES], const Tile& tile, int count) {
  float c[2][4] = {};
#pragma unroll
  for (int j = 0; j < 2; j++)
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      uint4 k = tile.keys[j][p];
      mma(c[j], q[4 * p], 0, q[4 * p + 1], 0, k.x, k.y);
      mma(c[j], q[4 * p + 2], 0, q[4 * p + 3], 0, k.z, k.w);
    }
  float largest = run.largest;
#pragma unroll
  for (int j = 0; j < 2; j++)
#pragma unroll
    for (int odd = 0; odd < 2; odd++) {
      c[j][odd] = 8 * j + 2 * (lane() % 4) + odd < count ? c[j][odd] * float(SCALE * 1.4426950408889634) : -bits_float(0x7f800000);
      largest = max_of(largest, c[j][odd]);
    }
  largest = max_of(largest, shuffle_xor(largest, 1));
  largest = max_of(largest, shuffle_xor(largest, 2));
  float base = largest == -bits_float(0x7f800000) ? 0 : largest, shrink = exp2_of(run.largest - base), sum = 0;
#pragma unroll
  for (int j = 0; j < 2; j++)
#pragma unroll
    for (int odd = 0; odd < 2; odd++) sum += c[j][odd] = exp2_of(c[j][odd] - base);
  sum += shuffle_xor(sum, 1);
  sum += shuffle_xor(sum, 2);
  run.total = run.total * shrink + sum;
  run.largest = largest;
#pragma unroll
  for (int g = 0; g < GROUP; g++) {
    float less = shuffle(shrink, 4 * g);
#pragma unroll
    for (int e = 0; e < 8; e++) run.out[g][e] *= less;
  }
#pragma unroll
  for (int i = 0; i < VALUE_READS; i++) {
    int quad = 4 / VALUE_TOKENS, first = i / (2 * quad), source = i / 2 % quad * VALUE_TOKENS + lane() / VALUE_LANES;
    // What is not seen may hold anything: 0 times that need not be 0.
    bool seen = value_token(i) < count;
    uint4 v = tile.values[i];
    float x[8] = {first_of(v.x), second_of(v.x), first_of(v.y), second_of(v.y),
                  first_of(v.z), second_of(v.z), first_of(v.w), second_of(v.w)};
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
      float share = shuffle(c[first][i % 2], 4 * g + source);
#pragma unroll
      for (int e = 0; e < 8; e++) run.out[g][e] += seen ? share * x[e] : 0;
    }
  }
}

// Sums of a warp over the tokens that its lanes have, to shared memory: largest, total, and the weighted values.
DEVICE void put(const Running& run, float* mix) {
#pragma unroll
  for (int g = 0; g < GROUP; g++) {
    float* to = mix + g * PART_WORDS;
    if (lane() == 4 * g) to[0] = run.largest, to[1] = run.total;
#pragma unroll
    for (int e = 0; e < 8; e++) {
      float x = run.out[g][e];
#pragma unroll
      for (int mask = VALUE_LANES; mask < 32; mask *= 2) x += shuffle_xor(x, mask);
      if (lane() < VALUE_LANES) to[2 + 8 * lane() + e] = x;
    }
  }
}

// What this lane has of a query or, after the group's heads, of the new key: asked of the blocks that make them.
DEVICE void await_heads(const u32* qkv, int kv_head, uint4 (&raw)[2 * PIECES]) {
  int g = lane() / 4, head = g < GROUP ? kv_head * GROUP + g : HEADS + kv_head;
  const uint4* from = (const uint4*)(qkv + head * HEAD_DIM) + 2 * (lane() % 4);
  if (g <= GROUP) {
    await(raw, [=](int i) { return from + i / 2 * 8 + i % 2; });
  } else {
#pragma unroll
    for (int i = 0; i < 2 * PIECES; i++) raw[i] = uint4{0, 0, 0, 0};
  }
  sync_lanes();
}

// The new token: its key from the lanes that turned it, its value from the blocks that made it; both into the pool.
DEVICE void add_new(Running& run, const u32 (&q)[4 * PIECES], const u32 (&words)[4 * PIECES], const u32* value, u16* key_to, u16* value_to) {
  Tile tile = {};
#pragma unroll
  for (int c = 0; c < PIECES; c++) {
    uint4 own = {words[4 * c], words[4 * c + 1], words[4 * c + 2], words[4 * c + 3]};
    if (lane() / 4 == GROUP) *((uint4*)(key_to + 32 * c) + lane() % 4) = own;
    int source = 4 * GROUP + lane() % 4;
    tile.keys[0][c] = uint4{float_bits(shuffle(bits_float(own.x), source)), float_bits(shuffle(bits_float(own.y), source)),
                            float_bits(shuffle(bits_float(own.z), source)), float_bits(shuffle(bits_float(own.w), source))};
  }
  uint4 raw[2];
  const uint4* from = (const uint4*)value + 2 * (lane() % VALUE_LANES);
  await(raw, [=](int i) { return from + i; });
  sync_lanes();
  tile.values[0] = uint4{pack(bits_float(raw[0].x), bits_float(raw[0].y)), pack(bits_float(raw[0].z), bits_float(raw[0].w)),
                         pack(bits_float(raw[1].x), bits_float(raw[1].y)), pack(bits_float(raw[1].z), bits_float(raw[1].w))};
  if (lane() < VALUE_LANES) *((uint4*)value_to + lane()) = tile.values[0];
  take(run, q, tile, 1);
}
