// Attention of tiles of a prompt (arXiv:2307.08691): a block has M queries of one key head, which are TOKENS tokens of
// a tile times the heads that share the key, and walks over the context in steps of SPAN tokens, two of them in shared memory.

constexpr int THREADS = WARPS * 32, M = WARPS * 16;
constexpr int STEPS = HEAD_DIM / 16, WIDTHS = HEAD_DIM / 8;
// In elements of the pool: 16 bytes of eight rows are in different banks.
constexpr int PITCH = HEAD_DIM + PIECE, VALUES = SPAN * PITCH, FACTORS = 2 * VALUES, STAGE = FACTORS + FP8 * 4 * SPAN;
// Elements of a row that one reading brings, as a matrix's rows of 16 bytes.
constexpr int READ = FP8 ? 32 : 16;

// Keys and then values of a span, zeros before `low` and beyond `last`: what nobody sees may hold anything.
DEVICE void copy_span(Kept* stage, const Kept* pool, const int* table, int kv, int first, int low, int last) {
  constexpr int PIECES = HEAD_DIM / PIECE;
  // Factors of eight keys, or of their values.
  if (FP8 && thread() < SPAN / 4) {
    const int token = first + thread() % (SPAN / 8) * 8;
    const bool seen = token <= last && (!WINDOW || token + 8 > low);
    const Kept* from = pool + (seen ? factor_at(kv, table[token / BLOCK], (u32)token % BLOCK) : 0);
    copy16(stage + FACTORS + thread() * 16, from + thread() / (SPAN / 8) * (u64)SLOTS * ROW, seen);
  }
  // Fewer at once leave registers for wide heads.
#pragma unroll(FP8 && HEAD_DIM > 128 ? 2 : 4)
  for (int i = thread(); i < SPAN * PIECES; i += THREADS) {
    int row = i / PIECES, piece = i % PIECES * PIECE, token = first + row;
    bool seen = token <= last && (!WINDOW || token >= low);
    const Kept* from = pool + (seen ? (u64)(table[token / BLOCK] * BLOCK + token % BLOCK) * ROW + piece : 0);
    copy16(stage + row * PITCH + piece, from, seen);
    copy16(stage + VALUES + row * PITCH + piece, from + (u64)SLOTS * ROW, seen);
  }
}

DEVICE void scores(float (&s)[SPAN / 8][4], const u32 (&q)[STEPS][4], const Kept* keys) {
#pragma unroll
  for (int n = 0; n < SPAN / 8; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0;
  const u16* factors = (const u16*)(keys + FACTORS) + lane() / 4;
#pragma unroll
  for (int k = 0; k < HEAD_DIM / READ; k++)
#pragma unroll
    for (int n = 0; n < SPAN / 16; n++) {
      u32 b[4];
      load_matrices(b, keys + (n * 16 + lane() / 16 * 8 + lane() % 8) * PITCH + k * READ + lane() / 8 % 2 * PIECE);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float* to = s[2 * n + i];
        if (FP8)
#pragma unroll
          for (int j = 0; j < 2; j++) {
            const u32(&a)[4] = q[(2 * k + j) % STEPS];
            const u32 codes = b[2 * i + j], factor = twice(factors[n * 16 + i * 8]);
            mma(to, a[0], a[1], a[2], a[3], even(codes, factor), odd(codes, factor));
          }
        else mma(to, q[k][0], q[k][1], q[k][2], q[k][3], b[2 * i], b[2 * i + 1]);
      }
    }
}
// Of rows lane / 4 and + 8; of codes each two of `out` have even and odd elements of the same 16.
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
      const int token = first + n / 2 * 8 + lane() % 4 * 2 + n % 2;
      x = token <= positions[i] && (!WINDOW || token > positions[i] - WINDOW) ? score_of(x) : -1e30f;
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
DEVICE void weigh(Running& run, const float (&s)[SPAN / 8][4], const Kept* values) {
#pragma unroll
  for (int k = 0; k < SPAN / 16; k++) {
    // Of tokens 2 (lane % 4) and the next one, and of those 8 behind them.
    const u32* factors = (const u32*)(values + FACTORS - VALUES + 2 * SPAN) + k * 8 + lane() % 4;
    const u32 of_low = FP8 ? factors[0] : 0, of_high = FP8 ? factors[4] : 0;
    const float *low = s[2 * k], *high = s[2 * k + 1];
    u32 a0 = pack(low[0], low[1]), a1 = pack(low[2], low[3]), a2 = pack(high[0], high[1]), a3 = pack(high[2], high[3]);
#pragma unroll
    for (int w = 0; w < HEAD_DIM / READ; w++) {
      u32 b[4];
      load_matrices_turned(b, values + (k * 16 + lane() % 16) * PITCH + w * READ + lane() / 16 * PIECE);
      // Codes are turned by twos: of 16 elements a product has the even ones, and the next one the odd ones.
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const u32 low = b[2 * i], high = b[2 * i + 1];
        float(*to)[4] = run.out + (FP8 ? 4 * w + 2 * i : 2 * w + i);
        if (FP8) {
          mma(to[0], a0, a1, a2, a3, even(low, of_low), even(high, of_high));
          mma(to[1], a0, a1, a2, a3, odd(low, of_low), odd(high, of_high));
        } else mma(to[0], a0, a1, a2, a3, low, high);
      }
    }
  }
}

KERNEL(prefill_attention, THREADS, 1)(
    const u16* queries, const Kept* pool, const int* layer, const int* positions, const int* tables, const u16* sinks,
    u16* out) {
  SHARED(memory);
  Kept* stages = (Kept*)memory;
  float* lasts = (float*)(stages + 2 * STAGE);
  const int tile = block_z(), kv = block_y(), warp = thread() / 32;
  const int* table = tables + (u64)tile * TABLE;
  const Kept* keys = pool + (u64)layer[0] * 2 * SLOTS * ROW + kv * HEAD_DIM;
  // Of the lane's two rows: where the query is, and what it may see.
  u64 at[2];
  int seen[2];
  float sink[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int row = block_x() * M + warp * 16 + i * 8 + lane() / 4, token = tile * TOKENS + row / GROUP;
    seen[i] = row < TOKENS * GROUP ? positions[FIRST + token] : -2;
    at[i] = ((u64)token * HEADS + kv * GROUP + row % GROUP) * HEAD_DIM;
    sink[i] = SINKS ? of_bf16(sinks[kv * GROUP + row % GROUP]) * 1.4426950408889634f : -1e30f;
  }
  const int mine = (int)max_lanes((float)larger(seen[0], seen[1]));
  if (lane() == 0) lasts[warp] = (float)mine;
  // What the warp's first token sees; padding sees nothing.
  int lows[2];
  for (int i = 0; i < 2; i++) lows[i] = seen[i] < 0 ? 1 << 24 : larger(0, seen[i] - WINDOW + 1);
  const int own_low = WINDOW ? -(int)max_lanes(-(float)smaller(lows[0], lows[1])) : 0;
  if (WINDOW && lane() == 0) lasts[WARPS + warp] = (float)own_low;
  sync_block();
  int last = -1, low = WINDOW ? 1 << 24 : 0;
  for (int w = 0; w < WARPS; w++) {
    last = larger(last, (int)lasts[w]);
    if (WINDOW) low = smaller(low, (int)lasts[WARPS + w]);
  }
  const int start = low / SPAN * SPAN;

  copy_span(stages, keys, table, kv, start, low, last);
  copies_commit();
  u32 q[STEPS][4];
#pragma unroll
  for (int k = 0; k < STEPS; k++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      q[k][i] = q[k][i + 2] = 0;
      if (seen[i] < 0) continue;
      const u32* from = (const u32*)(queries + at[i] + k * 16);
      const uint2 pair = FP8 ? quad(from) : uint2{from[lane() % 4], from[lane() % 4 + 4]};
      q[k][i] = pair.x, q[k][i + 2] = pair.y;
    }
  Running run;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    run.peak[i] = sink[i], run.total[i] = SINKS && lane() % 4 == 0;
#pragma unroll
    for (int w = 0; w < WIDTHS; w++) run.out[w][2 * i] = run.out[w][2 * i + 1] = 0;
  }
  for (int first = start, stage = 0; first <= last; first += SPAN, stage ^= 1) {
    if (first + SPAN <= last) copy_span(stages + (stage ^ 1) * STAGE, keys, table, kv, first + SPAN, low, last);
    copies_commit();
    copies_wait<1>();
    sync_block();
    if (first <= mine && (!WINDOW || first + SPAN > own_low)) {
      float s[SPAN / 8][4];
      scores(s, q, stages + stage * STAGE);
      softmax(run, s, first, seen);
      weigh(run, s, stages + stage * STAGE + VALUES);
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
    for (int w = 0; w < WIDTHS; w += 2) {
      const float *x = run.out[w] + 2 * i, *y = run.out[w + 1] + 2 * i;
      u32* to = (u32*)(out + at[i] + w * 8);
      if (FP8) *(uint2*)(to + lane() % 4 * 2) = {pack(x[0] * share, y[0] * share), pack(x[1] * share, y[1] * share)};
      else to[lane() % 4] = pack(x[0] * share, x[1] * share), to[lane() % 4 + 4] = pack(y[0] * share, y[1] * share);
    }
  }
}
