// Attention of a block for one row, one KV head and a part of its context; each warp takes tiles of 16 tokens. Scores are
// q k^T, sums of values v^T p^T, both by mma: elements of a head are in an order that lets a lane read 16 bytes at once
// of a key and of a value, and what the scores' mma leaves with a lane is what that of the values wants of it.

// A lane of row g = lane / 4 (a head, or a token's key) has elements 32 c + 8 t + e, t = lane % 4.
#define PIECES (HEAD_DIM / 32)
// Of a value: elements 64 h + 8 g + e of tokens 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of a tile.
#define HALVES (HEAD_DIM / 64)
#define TURNS (HEAD_DIM / 16)
#define NOTHING (-bits_float(0x7f800000))

struct Tile {
  uint4 keys[2][PIECES];
  uint4 values[4][HALVES];
};
// Largest score and total of head lane / 4; sums of heads 2 t and 2 t + 1: out[i] has in its first two words element
// 8 g + i of a head of 128 and 8 g + 2 i of one of 64, in the others 64 + 8 g + i and 8 g + 2 i + 1.
struct Running {
  float largest, total;
  float out[TURNS][4];
};

// Where an element lies in shared memory, so that lanes write and read without meeting at a bank.
#define MIX_ROW 9
#define MIX_WORDS (2 + 2 * TURNS * MIX_ROW)
DEVICE int place_of(int element) {
  int g = element % 64 / 8, own = HALVES == 2 ? 2 * (element % 8) + element / 64 : element % 8;
  return 2 + own * MIX_ROW + g;
}

DEVICE u32 slot_of(const int* table, u32 token) { return table[token / BLOCK] * BLOCK + token % BLOCK; }

// Keys and values of tokens [start, start + 16) of a sequence of `length`; the last one again for those after it.
DEVICE void ask(Tile& tile, const u16* pool, const int* table, int kv_head, int start, int length) {
  const u16 *mine = pool + kv_head * HEAD_DIM, *values = mine + (u64)SLOTS * KV_HEADS * HEAD_DIM;
#pragma unroll
  for (int j = 0; j < 2; j++) {
    int token = smaller(start + 8 * j + lane() / 4, length - 1);
    const uint4* from = (const uint4*)(mine + (u64)slot_of(table, token) * (KV_HEADS * HEAD_DIM)) + lane() % 4;
#pragma unroll
    for (int c = 0; c < PIECES; c++) tile.keys[j][c] = load_early(from + 4 * c);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int token = smaller(start + 2 * (lane() % 4) + i % 2 + i / 2 * 8, length - 1);
    const uint4* from = (const uint4*)(values + (u64)slot_of(table, token) * (KV_HEADS * HEAD_DIM)) + lane() / 4;
#pragma unroll
    for (int h = 0; h < HALVES; h++) tile.values[i][h] = load_early(from + 8 * h);
  }
}

// Element `e` of two tokens in one word.
DEVICE u32 side_by_side(uint4 a, uint4 b, int e) {
  u32 x = e / 2 == 0 ? a.x : e / 2 == 1 ? a.y : e / 2 == 2 ? a.z : a.w;
  u32 y = e / 2 == 0 ? b.x : e / 2 == 1 ? b.y : e / 2 == 2 ? b.z : b.w;
  return e % 2 ? high_halves(x, y) : low_halves(x, y);
}

// Take the first `count` tokens of a tile into the running softmax.
DEVICE void take(Running& run, const u32 (&q)[4 * PIECES], const Tile& tile, int count) {
  float c[2][2][4] = {};
#pragma unroll
  for (int p = 0; p < PIECES; p++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      uint4 k = tile.keys[j][p];
      mma(c[j][0], q[4 * p], 0, q[4 * p + 1], 0, k.x, k.y);
      mma(c[j][1], q[4 * p + 2], 0, q[4 * p + 3], 0, k.z, k.w);
    }
  float largest = run.largest, x[2][2];
#pragma unroll
  for (int j = 0; j < 2; j++)
#pragma unroll
    for (int odd = 0; odd < 2; odd++) {
      bool seen = 8 * j + 2 * (lane() % 4) + odd < count;
      x[j][odd] = seen ? (c[j][0][odd] + c[j][1][odd]) * float(SCALE * 1.4426950408889634) : NOTHING;
      largest = max_of(largest, x[j][odd]);
    }
  largest = max_of(largest, shuffle_xor(largest, 1));
  largest = max_of(largest, shuffle_xor(largest, 2));
  float base = largest == NOTHING ? 0 : largest, shrink = exp2_of(run.largest - base);
#pragma unroll
  for (int j = 0; j < 2; j++)
#pragma unroll
    for (int odd = 0; odd < 2; odd++) x[j][odd] = exp2_of(x[j][odd] - base);
  // Each lane adds up its own tokens; `put` adds the lanes.
  run.total = run.total * shrink + (x[0][0] + x[0][1]) + (x[1][0] + x[1][1]);
  run.largest = largest;
  float first = shuffle(shrink, 8 * (lane() % 4)), second = shuffle(shrink, 8 * (lane() % 4) + 4);
  u32 low = pack(x[0][0], x[0][1]), high = pack(x[1][0], x[1][1]);
#pragma unroll
  for (int i = 0; i < TURNS; i++) {
    float(&o)[4] = run.out[i];
    o[0] *= first, o[1] *= second, o[2] *= first, o[3] *= second;
    int h = HALVES - 1, e = HALVES == 2 ? i : 2 * i, f = HALVES == 2 ? i : 2 * i + 1;
    mma(o, side_by_side(tile.values[0][0], tile.values[1][0], e), side_by_side(tile.values[0][h], tile.values[1][h], f),
        side_by_side(tile.values[2][0], tile.values[3][0], e), side_by_side(tile.values[2][h], tile.values[3][h], f),
        low, high);
  }
}

// A warp's part to shared memory, a head after the other: largest, total, sums.
DEVICE void put(const Running& run, float* mix) {
  int g = lane() / 4, t = lane() % 4;
  float total = run.total + shuffle_xor(run.total, 1);
  total += shuffle_xor(total, 2);
  if (t == 0 && g < GROUP) mix[g * MIX_WORDS] = run.largest, mix[g * MIX_WORDS + 1] = total;
#pragma unroll
  for (int odd = 0; odd < 2; odd++) {
    if (2 * t + odd >= GROUP) continue;
    float* to = mix + (2 * t + odd) * MIX_WORDS + 2 + g;
#pragma unroll
    for (int i = 0; i < TURNS; i++)
#pragma unroll
      for (int upper = 0; upper < 2; upper++) to[(2 * i + upper) * MIX_ROW] = run.out[i][2 * upper + odd];
  }
}

// RMSNorm and RoPE of a head, two neighbours of whose halves each lane has.
DEVICE void turn(float2& low, float2& high, const float* angles, const float* weights) {
  int first = lane() < HEAD_DIM / 4 ? 2 * lane() : 0;
#if QK_NORM
  float sum = low.x * low.x + low.y * low.y + high.x * high.x + high.y * high.y;
  for (int mask = 1; mask < 32; mask *= 2) sum += shuffle_xor(sum, mask);
  float scale = rsqrt_of(sum / HEAD_DIM + float(RMS_EPS));
  float2 w = *(const float2*)(weights + first), v = *(const float2*)(weights + HEAD_DIM / 2 + first);
  low.x *= scale * w.x, low.y *= scale * w.y, high.x *= scale * v.x, high.y *= scale * v.y;
#endif
  float2 cos = *(const float2*)(angles + first), sin = *(const float2*)(angles + HEAD_DIM / 2 + first), x = low;
  low.x = x.x * cos.x - high.x * sin.x, low.y = x.y * cos.y - high.y * sin.y;
  high.x = high.x * cos.x + x.x * sin.x, high.y = high.y * cos.y + x.y * sin.y;
}

// This lane's words of the queries; rows after the group's are nothing.
DEVICE void read_queries(u32 (&q)[4 * PIECES], const u32* heads) {
  int g = lane() / 4;
#pragma unroll
  for (int c = 0; c < PIECES; c++) {
    uint4 x = {0, 0, 0, 0};
    if (g < GROUP) x = *((const uint4*)(heads + g * (HEAD_DIM / 2) + 16 * c) + lane() % 4);
    q[4 * c] = x.x, q[4 * c + 1] = x.y, q[4 * c + 2] = x.z, q[4 * c + 3] = x.w;
  }
}

// A tile of which `take` is to see one token: its key, then its value.
DEVICE void read_newest(Tile& tile, const u32* key) {
  const u32* value = key + HEAD_DIM / 2;
#pragma unroll
  for (int c = 0; c < PIECES; c++) tile.keys[0][c] = tile.keys[1][c] = *((const uint4*)(key + 16 * c) + lane() % 4);
#pragma unroll
  for (int h = 0; h < HALVES; h++) {
    uint4 x = *((const uint4*)(value + 32 * h) + lane() / 4);
#pragma unroll
    for (int i = 0; i < 4; i++) tile.values[i][h] = x;
  }
}
