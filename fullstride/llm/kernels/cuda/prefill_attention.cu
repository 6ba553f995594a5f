// Attention of tiles of a prompt (arXiv:2307.08691): a block has M queries of one key head, which are TOKENS tokens of
// a tile times the heads that share the key, and walks over the context in steps of SPAN tokens, two of them in shared memory.

constexpr int THREADS = WARPS * 32, M = WARPS * 16;
constexpr int STEPS = HEAD_DIM / 16, WIDTHS = HEAD_DIM / 8;
// In elements: 16 bytes of eight rows are in different banks.
constexpr int PITCH = HEAD_DIM + 8, STAGE = 2 * SPAN * PITCH;

// Keys and then values of a span, zeros beyond `last`: what nobody sees may hold anything.
DEVICE void copy_span(u16* stage, const u16* pool, const int* table, int first, int last) {
  constexpr int PIECES = HEAD_DIM / 8;
#pragma unroll 4
  for (int i = thread(); i < SPAN * PIECES; i += THREADS) {
    int row = i / PIECES, piece = i % PIECES * 8, token = first + row;
    bool seen = token <= last;
    const u16* from = pool + (seen ? (u64)(table[token / BLOCK] * BLOCK + token % BLOCK) * ROW + piece : 0);
    copy16(stage + row * PITCH + piece, from, seen);
    copy16(stage + (SPAN + row) * PITCH + piece, from + (u64)SLOTS * ROW, seen);
  }
}

DEVICE void scores(float (&s)[SPAN / 8][4], const u32 (&q)[STEPS][4], const u16* keys) {
#pragma unroll
  for (int n = 0; n < SPAN / 8; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0;
#pragma unroll
  for (int k = 0; k < STEPS; k++)
#pragma unroll
    for (int n = 0; n < SPAN / 16; n++) {
      u32 b[4];
      load_matrices(b, keys + (n * 16 + lane() / 16 * 8 + lane() % 8) * PITCH + k * 16 + lane() / 8 % 2 * 8);
      mma(s[2 * n], q[k][0], q[k][1], q[k][2], q[k][3], b[0], b[1]);
      mma(s[2 * n + 1], q[k][0], q[k][1], q[k][2], q[k][3], b[2], b[3]);
    }
}
// Of rows lane / 4 and + 8.
struct Running {
  float peak[2], total[2], out[WIDTHS][4];
};
DEVICE void softmax(Running& run, float (&s)[SPAN / 8][4], int first, const int* positions) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float peak = run.peak[i];
#pragma unroll
    for (int n = 0; n < SPAN / 4; n++) {
      float& x = s[n / 2][2 * i + n % 2];
      x = first + n / 2 * 8 + lane() % 4 * 2 + n % 2 <= positions[i] ? x * (float)(SCALE) : -1e30f;
      peak = max_of(peak, x);
    }
    peak = max_of(peak, shuffle_xor(peak, 1));
    peak = max_of(peak, shuffle_xor(peak, 2));
    float shrink = exp2_of(run.peak[i] - peak), sum = 0;
#pragma unroll
    for (int n = 0; n < SPAN / 4; n++) {
      float& x = s[n / 2][2 * i + n % 2];
      x = exp2_of(x - peak), sum += x;
    }
    run.peak[i] = peak, run.total[i] = run.total[i] * shrink + sum;
#pragma unroll
    for (int w = 0; w < WIDTHS; w++) run.out[w][2 * i] *= shrink, run.out[w][2 * i + 1] *= shrink;
  }
}
DEVICE void weigh(Running& run, const float (&s)[SPAN / 8][4], const u16* values) {
#pragma unroll
  for (int k = 0; k < SPAN / 16; k++) {
    const float *low = s[2 * k], *high = s[2 * k + 1];
    u32 a0 = pack(low[0], low[1]), a1 = pack(low[2], low[3]), a2 = pack(high[0], high[1]), a3 = pack(high[2], high[3]);
#pragma unroll
    for (int w = 0; w < WIDTHS / 2; w++) {
      u32 b[4];
      load_matrices_turned(b, values + (k * 16 + lane() % 16) * PITCH + w * 16 + lane() / 16 * 8);
      mma(run.out[2 * w], a0, a1, a2, a3, b[0], b[1]);
      mma(run.out[2 * w + 1], a0, a1, a2, a3, b[2], b[3]);
    }
  }
}
DEVICE float max_lanes(float x) {
  for (int mask = 16; mask; mask >>= 1) x = max_of(x, shuffle_xor(x, mask));
  return x;
}

KERNEL(prefill_attention, THREADS, 1)(
    const u16* queries, const u16* pool, const int* layer, const int* positions, const int* tables, u16* out) {
  SHARED(memory);
  u16* stages = (u16*)memory;
  float* lasts = (float*)(stages + 2 * STAGE);
  const int tile = block_z(), kv = block_y(), warp = thread() / 32;
  const int* table = tables + (u64)tile * TABLE;
  const u16* keys = pool + (u64)layer[0] * 2 * SLOTS * ROW + kv * HEAD_DIM;
  // Of the lane's two rows: where the query is, and what it may see.
  u64 at[2];
  int seen[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int row = block_x() * M + warp * 16 + i * 8 + lane() / 4, token = tile * TOKENS + row / GROUP;
    seen[i] = row < TOKENS * GROUP ? positions[FIRST + token] : -2;
    at[i] = ((u64)token * HEADS + kv * GROUP + row % GROUP) * HEAD_DIM + lane() % 4 * 2;
  }
  const int mine = (int)max_lanes((float)larger(seen[0], seen[1]));
  if (lane() == 0) lasts[warp] = (float)mine;
  sync_block();
  int last = -1;
  for (int w = 0; w < WARPS; w++) last = larger(last, (int)lasts[w]);

  copy_span(stages, keys, table, 0, last);
  copies_commit();
  u32 q[STEPS][4];
#pragma unroll
  for (int k = 0; k < STEPS; k++)
#pragma unroll
    for (int n = 0; n < 4; n++)
      q[k][n] = seen[n % 2] >= 0 ? *(const u32*)(queries + at[n % 2] + k * 16 + n / 2 * 8) : 0;
  Running run;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    run.peak[i] = -1e30f, run.total[i] = 0;
#pragma unroll
    for (int w = 0; w < WIDTHS; w++) run.out[w][2 * i] = run.out[w][2 * i + 1] = 0;
  }
  for (int first = 0, stage = 0; first <= last; first += SPAN, stage ^= 1) {
    if (first + SPAN <= last) copy_span(stages + (stage ^ 1) * STAGE, keys, table, first + SPAN, last);
    copies_commit();
    copies_wait<1>();
    sync_block();
    if (first <= mine) {
      float s[SPAN / 8][4];
      scores(s, q, stages + stage * STAGE);
      softmax(run, s, first, seen);
      weigh(run, s, stages + stage * STAGE + SPAN * PITCH);
    }
    sync_block();
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float total = run.total[i];
    total += shuffle_xor(total, 1);
    total += shuffle_xor(total, 2);
    if (seen[i] < -1) continue;
    float share = seen[i] < 0 ? 0 : 1 / total;
#pragma unroll
    for (int w = 0; w < WIDTHS; w++) *(u32*)(out + at[i] + w * 8) = pack(run.out[w][2 * i] * share, run.out[w][2 * i + 1] * share);
  }
}
