// Attention of one token a row. A cluster of blocks has a row's queries of one key head; its warps take tiles of 16
// tokens of context in turn, straight from the pool into the registers of mma: no shared memory, all loads of the next
// tile under way while one is worked on. How many blocks of a cluster work follows from the row's length alone, so that
// neither the batch nor the table's width changes what is added in which order.

constexpr int THREADS = NEAR * WARPS * 32, TILE = 16;
constexpr int CHUNKS = HEAD_DIM / 32, WIDTHS = HEAD_DIM / 64, COLUMNS = (GROUP + 7) / 8;
// Heads that a warp prepares, the key's among them, and parts that are added up.
constexpr int EACH = (GROUP + WARPS) / WARPS, PARTS = CLUSTER * WARPS;
// In elements: 16 bytes of eight rows are in different banks.
constexpr int Q_PITCH = HEAD_DIM + 32, PART = HEAD_DIM + 4;

// A lane's part of 16 keys: tokens lane / 4 and + 8, of every 32 elements the eight from 8 (lane % 4) on. Which of them
// mma multiplies with which is its own affair, if only queries come in the same order.
struct Keys {
  uint4 x[2][CHUNKS];
};
// Of 16 values: tokens 2 (lane % 4), + 1, + 8, + 9, of every 64 elements the eight from 8 (lane / 4) on.
struct Values {
  uint4 x[4][WIDTHS];
};
// Numbers of the blocks in which a tile's halves are; most sizes of blocks hold whole tiles.
struct Places {
  int low, high;
};

DEVICE Places places(const int* table, int tile, int n) {
  int last = larger(n - 1, 0) / BLOCK, first = tile * TILE;
  int low = table[smaller(first / BLOCK, last)];
  return {low, BLOCK % TILE ? table[smaller((first + 8) / BLOCK, last)] : low};
}
// What nobody sees is not read: it may hold anything, and 0 times that need not be 0.
DEVICE uint4 load_seen(const u16* from, bool seen) {
  return seen ? load_row((const uint4*)from) : uint4{0, 0, 0, 0};
}
DEVICE void load_keys(Keys& keys, const u16* pool, int tile, Places at, int n) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int token = tile * TILE + 8 * i + lane() / 4;
    const u16* from = pool + (u64)((i ? at.high : at.low) * BLOCK + token % BLOCK) * ROW + lane() % 4 * 8;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) keys.x[i][c] = load_seen(from + 32 * c, token < n);
  }
}
DEVICE void load_values(Values& values, const u16* pool, int tile, Places at, int n) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int token = tile * TILE + i / 2 * 8 + lane() % 4 * 2 + i % 2;
    const u16* from = pool + (u64)((i / 2 ? at.high : at.low) * BLOCK + token % BLOCK) * ROW + lane() / 4 * 8;
#pragma unroll
    for (int w = 0; w < WIDTHS; w++) values.x[i][w] = load_seen(from + 64 * w, token < n);
  }
}

// A warp's running softmax; of column c the lane has heads 8 c + 2 (lane % 4) and the next one.
struct Running {
  float peak[COLUMNS][2], total[COLUMNS][2], out[COLUMNS][WIDTHS][4][4];
};

// Scores of 16 tokens: tokens lane / 4 of two heads, tokens lane / 4 + 8 of the same.
DEVICE void scores(float (&s)[COLUMNS][4], const Keys& keys, const u16* q) {
#pragma unroll
  for (int column = 0; column < COLUMNS; column++) {
#pragma unroll
    for (int n = 0; n < 4; n++) s[column][n] = 0;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      uint4 b = *(const uint4*)(q + (column * 8 + lane() / 4) * Q_PITCH + 32 * c + lane() % 4 * 8);
      const uint4 &low = keys.x[0][c], &high = keys.x[1][c];
      mma(s[column], low.x, high.x, low.y, high.y, b.x, b.y);
      mma(s[column], low.z, high.z, low.w, high.w, b.z, b.w);
    }
  }
}
// exp2(s - peak) of a column, as mma wants it for the product with the values.
DEVICE uint2 shares(Running& run, float* s, int column, int first, int n) {
  float shrink[2];
#pragma unroll
  for (int i = 0; i < 4; i++) s[i] = first + lane() / 4 + i / 2 * 8 < n ? s[i] * (float)(SCALE) : -1e30f;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float peak = max_of(s[i], s[i + 2]);
#pragma unroll
    for (int mask = 4; mask < 32; mask <<= 1) peak = max_of(peak, shuffle_xor(peak, mask));
    peak = max_of(peak, run.peak[column][i]);
    shrink[i] = exp2_of(run.peak[column][i] - peak), run.peak[column][i] = peak;
    s[i] = exp2_of(s[i] - peak), s[i + 2] = exp2_of(s[i + 2] - peak);
    run.total[column][i] = run.total[column][i] * shrink[i] + (s[i] + s[i + 2]);
  }
#pragma unroll
  for (int w = 0; w < WIDTHS * 4; w++)
#pragma unroll
    for (int i = 0; i < 4; i++) run.out[column][w / 4][w % 4][i] *= shrink[i % 2];
  return {transpose(pack(s[0], s[1])), transpose(pack(s[2], s[3]))};
}
DEVICE u32 word_of(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }
DEVICE void weigh(Running& run, const Values& values, const uint2 (&p)[COLUMNS]) {
#pragma unroll
  for (int w = 0; w < WIDTHS; w++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      u32 x0 = word_of(values.x[0][w], i), x1 = word_of(values.x[1][w], i);
      u32 x2 = word_of(values.x[2][w], i), x3 = word_of(values.x[3][w], i);
      u32 a0 = both_lows(x0, x1), a1 = both_highs(x0, x1), a2 = both_lows(x2, x3), a3 = both_highs(x2, x3);
#pragma unroll
      for (int column = 0; column < COLUMNS; column++) mma(run.out[column][w][i], a0, a1, a2, a3, p[column].x, p[column].y);
    }
}
// Of each head HEAD_DIM weighted sums, the peak and the total.
DEVICE void keep(Running& run, float* part) {
#pragma unroll
  for (int n = 0; n < COLUMNS * 2; n++) {
    int column = n / 2, i = n % 2, head = column * 8 + lane() % 4 * 2 + i;
    float total = run.total[column][i];
#pragma unroll
    for (int mask = 4; mask < 32; mask <<= 1) total += shuffle_xor(total, mask);
    if (head >= GROUP) continue;
    float* to = part + head * PART;
    if (lane() / 4 == 0) to[HEAD_DIM] = run.peak[column][i], to[HEAD_DIM + 1] = total;
#pragma unroll
    for (int w = 0; w < WIDTHS * 4; w++) {
      const float* out = run.out[column][w / 4][w % 4];
      *(float2*)(to + w / 4 * 64 + lane() / 4 * 8 + w % 4 * 2) = {out[i], out[i + 2]};
    }
  }
}

// Queries and the key of this row, in bf16 to `q`: all that is read of them is under way at once.
DEVICE void prepare(
    const u16* qkv, int kv, int warp, const Head& angle, const u16* q_norm, const u16* k_norm, u16* q) {
  Head x[EACH], q_weight, k_weight;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    int head = warp + i * WARPS;
    x[i] = head_at(qkv + (head < GROUP ? kv * GROUP + head : HEADS + kv) * HEAD_DIM);
  }
  if (NORMS) q_weight = head_at(q_norm), k_weight = head_at(k_norm);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    int head = warp + i * WARPS;
    if (NORMS) x[i] = normalised(x[i], head < GROUP ? q_weight : k_weight);
    if (head <= GROUP) rotated(x[i], angle, q + (head < GROUP ? head : COLUMNS * 8) * Q_PITCH);
  }
}
// Of the token itself.
DEVICE void own_scores(const u16* q, int warp, float* fresh) {
  Head k = head_at(q + COLUMNS * 8 * Q_PITCH);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    int head = warp + i * WARPS;
    Head x = head_at(q + smaller(head, GROUP - 1) * Q_PITCH);
    float sum = 0;
    for (int j = 0; j < PER; j++) sum += x.a[j] * k.a[j] + x.b[j] * k.b[j];
    sum = sum_lanes(sum);
    if (head < GROUP && lane() == 0) fresh[head] = sum * (float)(SCALE);
  }
}
// Two elements of a head's result from all warps' parts, in their order, and from the token's own value.
DEVICE u32 merged(const float* part, int element, int ranks, float fresh, u32 value) {
  float2 ends[PARTS], sums[PARTS];
  float peak = fresh;
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    ends[p] = {-1e30f, 0}, sums[p] = {0, 0};
    if (p / WARPS >= ranks) continue;
    const float* from = of_block(part, p / WARPS) + p % WARPS * GROUP * PART;
    ends[p] = *(const float2*)(from + HEAD_DIM), sums[p] = *(const float2*)(from + element);
  }
#pragma unroll
  for (int p = 0; p < PARTS; p++) peak = max_of(peak, ends[p].x);
  float total = exp2_of(fresh - peak), x = total * first_of(value), y = total * second_of(value);
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    float share = exp2_of(ends[p].x - peak);
    total += share * ends[p].y, x += share * sums[p].x, y += share * sums[p].y;
  }
  return pack(x / total, y / total);
}

CLUSTER_KERNEL(decode_attention, THREADS, RESIDENT, CLUSTER)(
    const u16* qkv, const u16* pool, const int* layer, const int* positions, const int* slots, const int* tables,
    const float* cos, const float* sin, const u16* q_norm, const u16* k_norm, u16* out, u16* written) {
  SHARED(memory);
  const int rank = block_x() % CLUSTER, near = thread() / 32 / WARPS, warp = thread() / 32 % WARPS;
  const int kv = block_x() / CLUSTER * NEAR + near, row = block_y(), member = thread() % (WARPS * 32);
  u16 *q = (u16*)memory + near * (COLUMNS * 8 + 1) * Q_PITCH, *k = q + COLUMNS * 8 * Q_PITCH;
  float* parts = (float*)((u16*)memory + NEAR * (COLUMNS * 8 + 1) * Q_PITCH) + near * (WARPS * PART + 2) * GROUP;
  float* fresh = parts + WARPS * GROUP * PART;
  // Tokens in the pool; this one's key and value are not there yet.
  const int n = positions[row], tiles = (n + TILE - 1) / TILE;
  const int ranks = larger(1, smaller(CLUSTER, (tiles + WARPS * LEAST - 1) / (WARPS * LEAST)));
  u32* to = (u32*)(out + ((u64)row * HEADS + kv * GROUP) * HEAD_DIM);
  if (n < 0 && rank == 0)
    for (int i = member; i < GROUP * HALF; i += WARPS * 32) to[i] = 0;
  if (n < 0 || rank >= ranks) return;

  const u64 keys_at = (u64)layer[0] * 2 * SLOTS * ROW + kv * HEAD_DIM, values_at = keys_at + (u64)SLOTS * ROW;
  const int* table = tables + (u64)row * TABLE;
  const int step = ranks * WARPS;
  int tile = rank * WARPS + warp;
  Places at = places(table, tile, n), next = places(table, tile + step, n);
  Keys keys;
  Values values;
  load_keys(keys, pool + keys_at, tile, at, n);
  load_values(values, pool + values_at, tile, at, n);

  // What follows until the loop is done while the first keys and values come.
  const u16 *mine = qkv + (u64)row * WIDE, *v = mine + (HEADS + KV_HEADS + kv) * HEAD_DIM;
  prepare(mine, kv, warp, angles(cos + (u64)row * HALF, sin + (u64)row * HALF), q_norm, k_norm, q);
  const u64 slot = (u64)slots[row] * ROW;
  sync_block();
  own_scores(q, warp, fresh);
  if (rank == 0)
    for (int i = member; i < HALF; i += WARPS * 32) {
      ((u32*)(written + keys_at + slot))[i] = ((const u32*)k)[i];
      ((u32*)(written + values_at + slot))[i] = ((const u32*)v)[i];
    }

  Running run;
#pragma unroll
  for (int column = 0; column < COLUMNS; column++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      run.peak[column][i] = -1e30f, run.total[column][i] = 0;
#pragma unroll
      for (int w = 0; w < WIDTHS * 8; w++) run.out[column][w / 8][w / 2 % 4][w % 2 * 2 + i] = 0;
    }
  for (; tile < tiles; tile += step) {
    float s[COLUMNS][4];
    uint2 p[COLUMNS];
    scores(s, keys, q);
    load_keys(keys, pool + keys_at, tile + step, next, n);
#pragma unroll
    for (int column = 0; column < COLUMNS; column++) p[column] = shares(run, s[column], column, tile * TILE, n);
    weigh(run, values, p);
    load_values(values, pool + values_at, tile + step, next, n);
    next = places(table, tile + 2 * step, n);
  }
  keep(run, parts + warp * GROUP * PART);
  if (ranks > 1) cluster_arrive(), cluster_wait();
  else sync_block();
  for (int i = rank * WARPS * 32 + member; i < GROUP * HALF; i += ranks * WARPS * 32) {
    int head = i / HALF;
    to[i] = merged(parts + head * PART, i % HALF * 2, ranks, fresh[head], ((const u32*)v)[i % HALF]);
  }
  // Nobody ends while others read of it.
  if (ranks > 1) cluster_arrive(), cluster_wait();
}
