// Attention of one token a row. A cluster of blocks has a row's queries of one key head; its warps take tiles of 16
// tokens of context in turn, each through a ring of its own in shared memory: no warp waits for another, and STAGES - 1
// tiles of each are under way. How many blocks of a cluster work follows from the row's length alone, so that neither
// the batch nor the table's width changes what is added in which order.

// Before Hopper no blocks share their memory: those of a row leave their parts in global memory, and `decode_sums.cu` adds
// them up.

constexpr int THREADS = WARPS * 32;
// Of 16 elements, 8 heads; 16 bytes of a row.
constexpr int STEPS = HEAD_DIM / 16, COLUMNS = (GROUP + 7) / 8, PIECES = HEAD_DIM / PIECE;
// Steps whose elements one reading of a tile brings.
constexpr int EACH_READ = FP8 ? 2 : 1;
// Heads that a warp prepares, key and value among them.
constexpr int EACH = (GROUP + 1 + WARPS) / WARPS;
// In elements, a stage's those of the pool; rows of queries and parts begin in different banks.
constexpr int Q_PITCH = HEAD_DIM + 8, PART = HEAD_DIM + 4;
constexpr int VALUES = TILE * HEAD_DIM, FACTORS = 2 * VALUES, STAGE = FACTORS + FP8 * 4 * TILE;

// Where 16 bytes of a tile's row are: eight rows' are in different banks.
DEVICE int place(int row, int piece) {
  const int turn = PIECES % 8 == 0 ? row % 8 : PIECES % 4 == 0 ? row / 2 % 4 : PIECES % 2 == 0 ? row / 4 % 2 : 0;
  return row * HEAD_DIM + (piece ^ turn) * PIECE;
}

// The row's block numbers, 32 of them in a warp's lanes, and the next 32; tiles come in order.
struct Window {
  const u32* table;
  u32 now, next;
  int at;
  // Of codes: where the factors are that the lane copies, of a row's first block.
  const Kept* factors;
};
// Behind a row's blocks the table may hold anything; only the address has to be right.
DEVICE u32 lanes_of(const u32* table, int window) { return load_now(table + smaller(window * 32 + lane(), TABLE - 1)); }
DEVICE int block_of(Window& w, int token) {
  const int block = token / BLOCK, window = block / 32;
  if (window != w.at) {
    w.now = window == w.at + 1 ? w.next : lanes_of(w.table, window);
    w.at = window, w.next = lanes_of(w.table, window + 1);
  }
  return (int)float_bits(shuffle(bits_float(w.now), block % 32));
}
// Keys and then values of a tile, zeros from token n on and before token `low`: what nobody sees may hold anything.
DEVICE void copy_tile(Kept* stage, const Kept* pool, int tile, Window& window, int low_token, int n) {
  constexpr int ROWS = 32 / PIECES;
  const int row = lane() / PIECES, piece = lane() % PIECES;
  // Most sizes of blocks hold whole tiles.
  const int low = block_of(window, tile * TILE), high = BLOCK % TILE ? block_of(window, tile * TILE + 8) : low;
#pragma unroll
  for (int half = 0; half < TILE; half += 8) {
    const int first = tile * TILE + half;
    const Kept* from = pool + (u64)((half ? high : low) * BLOCK + first % BLOCK + row) * ROW + piece * PIECE;
#pragma unroll
    for (int i = row; i < 8 + row; i += ROWS, from += ROWS * ROW) {
      // Of a head of 96 elements 32 pieces are no whole rows.
      if (32 % PIECES && (row >= ROWS || i >= 8)) continue;
      const bool seen = first + i < n && (!WINDOW || first + i >= low_token);
      copy16(stage + place(half + i, piece), from, seen);
      copy16(stage + VALUES + place(half + i, piece), from + (u64)SLOTS * ROW, seen);
    }
  }
  // Factors of eight keys, or of their values.
  if (FP8 && lane() < 4) {
    const int half = lane() % 2 * 8, token = tile * TILE + half;
    const Kept* from = window.factors + (u64)(half ? high : low) * (2 * KV_HEADS * BLOCK) + (u32)token % BLOCK * 2;
    copy16(stage + FACTORS + lane() * 16, from, token < n && (!WINDOW || token + 8 > low_token));
  }
}

// A warp's running softmax; of column c the lane has heads 8 c + 2 (lane % 4) and the next one.
struct Running {
  float peak[COLUMNS][2], total[COLUMNS][2], out[COLUMNS][STEPS][4];
};

// Scores of 16 tokens: tokens lane / 4 of two heads, tokens lane / 4 + 8 of the same.
DEVICE void scores(float (&s)[COLUMNS][4], const Kept* keys, const u32 (&q)[COLUMNS][STEPS][2]) {
#pragma unroll
  for (int column = 0; column < COLUMNS; column++) s[column][0] = s[column][1] = s[column][2] = s[column][3] = 0;
  const u16* from = (const u16*)(keys + FACTORS) + lane() / 4;
  const u32 factors[] = {FP8 ? twice(from[0]) : 0, FP8 ? twice(from[8]) : 0};
#pragma unroll
  for (int k = 0; k < STEPS; k += EACH_READ) {
    u32 read[4], a[EACH_READ][4];
    load_matrices(read, keys + place(lane() % 16, 2 * k / EACH_READ + lane() / 16));
    // A word of codes has four elements of a row, as much as two words otherwise.
    for (int i = 0; i < 4; i++) a[0][i] = read[i];
    if (FP8)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        u32* to = a[i / 2 % EACH_READ] + i % 2;
        to[0] = even(read[i], factors[i % 2]), to[2] = odd(read[i], factors[i % 2]);
      }
#pragma unroll
    for (int i = 0; i < EACH_READ; i++)
#pragma unroll
      for (int column = 0; column < COLUMNS; column++)
        mma(s[column], a[i][0], a[i][1], a[i][2], a[i][3], q[column][k + i][0], q[column][k + i][1]);
  }
}
// exp2(s - peak) of a column, as mma wants it for the product with the values.
DEVICE uint2 shares(Running& run, float* s, int column, int first, int low, int n) {
  float shrink[2];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int token = first + lane() / 4 + i / 2 * 8;
    s[i] = token < n && (!WINDOW || token >= low) ? score_of(s[i]) : -1e30f;
  }
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
  for (int w = 0; w < STEPS; w++)
#pragma unroll
    for (int i = 0; i < 4; i++) run.out[column][w][i] *= shrink[i % 2];
  return {transpose(pack(s[0], s[1])), transpose(pack(s[2], s[3]))};
}
// Sums of 16 elements, lane / 4 and + 8 (of codes 2 lane / 4 and the next one), of two heads each.
DEVICE void weigh(Running& run, const Kept* values, const uint2 (&p)[COLUMNS]) {
  const u32* from = (const u32*)(values + FACTORS - VALUES + 2 * TILE) + lane() % 4;
  const u32 factors[] = {FP8 ? from[0] : 0, FP8 ? from[4] : 0};
#pragma unroll
  for (int w = 0; w < STEPS; w += EACH_READ) {
    u32 read[4], a[EACH_READ][4];
    load_matrices_turned(read, values + place(lane() / 16 * 8 + lane() % 8, 2 * w / EACH_READ + lane() / 8 % 2));
    for (int i = 0; i < 4; i++) a[0][i] = read[i];
    // Turned by twos: of two tokens each has elements 2 lane / 4 and the next one.
    if (FP8)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        u32* to = a[i % EACH_READ] + i / 2 * 2;
        to[0] = even(read[i], factors[i / 2]), to[1] = odd(read[i], factors[i / 2]);
      }
#pragma unroll
    for (int i = 0; i < EACH_READ; i++)
#pragma unroll
      for (int column = 0; column < COLUMNS; column++)
        mma(run.out[column][w + i], a[i][0], a[i][1], a[i][2], a[i][3], p[column].x, p[column].y);
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
    for (int w = 0; w < STEPS * 2; w++)
      to[FP8 ? w / 2 * 16 + lane() / 4 * 2 + w % 2 : w * 8 + lane() / 4] = run.out[column][w / 2][w % 2 * 2 + i];
  }
}

// What a warp reads of its row's queries, key and value.
struct Fresh {
  Head x[EACH], angle, q_weight, k_weight;
};
// What is there before the chain's kernels have run, and what is not.
DEVICE Fresh known_at(const float* cos, const float* sin, const u16* q_norm, const u16* k_norm) {
  Fresh all;
  all.angle = angles(cos, sin);
  if (NORMS) all.q_weight = head_at(q_norm), all.k_weight = head_at(k_norm);
  return all;
}
DEVICE void take_heads(Fresh& all, const u16* qkv, int kv, int warp) {
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    int head = warp + i * WARPS;
    all.x[i] = head_at(qkv + (head < GROUP ? kv * GROUP + head : HEADS + (head > GROUP) * KV_HEADS + kv) * HEAD_DIM);
  }
}
// Queries, key and value in bf16 to `q`; of codes the latter two's factors.
DEVICE void prepare(const Fresh& all, int warp, u16* q, u32* factors) {
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    int head = warp + i * WARPS;
    Head x = all.x[i], weight = all.q_weight;
    if (head >= GROUP) weight = all.k_weight;
    if (NORMS) x = normalised(x, weight);
    x = rotated(x, all.angle);
    if (head > GROUP) x = all.x[i];
    if (FP8 && head >= GROUP && head <= GROUP + 1) {
      const u32 factor = factor_of(x);
      x = as_kept(x, factor);
      if (lane() == 0) factors[head - GROUP] = factor;
    }
    if (head <= GROUP + 1) store_head(x, q + head * Q_PITCH);
  }
}
// Of the token itself.
DEVICE void own_scores(const u16* q, int warp, float* fresh) {
  Head k = head_at(q + GROUP * Q_PITCH);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    int head = warp + i * WARPS;
    Head x = head_at(q + smaller(head, GROUP - 1) * Q_PITCH);
    float sum = 0;
    for (int j = 0; j < PER; j++) sum += x.a[j] * k.a[j] + x.b[j] * k.b[j];
    sum = sum_lanes(sum);
    if (head < GROUP && lane() == 0) fresh[head] = score_of(sum);
  }
}
CLUSTER_KERNEL(decode_attention, THREADS, 1, CLUSTER)(
    const u16* qkv, const Kept* pool, const int* layer, const int* positions, const int* slots, const int* tables,
    const float* cos, const float* sin, const u16* q_norm, const u16* k_norm, const u16* sinks, u16* out, Kept* written) {
  SHARED(memory);
  const int rank = block_x() % PARTS, kv = block_x() / PARTS, row = block_y(), warp = thread() / 32;
  Kept *rings = (Kept*)memory, *ring = rings + warp * STAGES * STAGE;
  u16 *q = (u16*)(rings + WARPS * STAGES * STAGE), *k = q + GROUP * Q_PITCH, *v = k + Q_PITCH;
  // Sums that the cluster's other blocks send to the first one, and the barrier that hears of them.
  Pair* sent = (Pair*)(v + Q_PITCH);
  u64* bar = (u64*)(sent + (CLUSTER - 1) * GROUP * HALF);
  float* own = (float*)(bar + 2);
  u32* factors = (u32*)(own + GROUP);
  let_next_begin();
  // All that does not follow from the row's length, in one trip to memory; its first tiles are the same for every length.
  Fresh fresh = known_at(cos + (u64)row * HALF, sin + (u64)row * HALF, q_norm, k_norm);
  if (!CHAINED) take_heads(fresh, qkv + (u64)row * WIDE, kv, warp);
  const u32* table = (const u32*)tables + (u64)row * TABLE;
  Window window = {table, lanes_of(table, 0), lanes_of(table, 1), 0, nullptr};
  const u64 at_layer = (u64)load_now((const u32*)layer) * 2 * SLOTS * ROW + kv * HEAD_DIM;
  const u32 slot = load_now((const u32*)slots + row);
  // Tokens in the pool; this one's key and value are not there yet.
  const int n = (int)load_now((const u32*)positions + row), tiles = (n + TILE - 1) / TILE;
  const int low = first_seen(n), ranks = ranks_of(n), step = ranks * WARPS;
  // Pairs of elements of the row's heads.
  const auto to = [&](int i) -> u32& {
    int feature = kv * GROUP * HEAD_DIM + 2 * i;
    return *(u32*)(out + (CHAINED ? place_of(row, feature) : (u64)row * HEADS * HEAD_DIM + feature));
  };
  if (n < 0 || rank >= ranks) {
    // In a chain no kernel ends before those before it.
    await_previous();
    if (n < 0 && rank == 0 && CLUSTER == PARTS)
#pragma unroll 1
      for (int i = thread(); i < GROUP * HALF; i += THREADS) to(i) = 0;
    return;
  }

  int tile = low / TILE + rank * WARPS + warp;
  // Keys' by two lanes, values' by the next two.
  if (FP8) window.factors = pool + at_layer + factor_at(kv, 0, 0) + lane() / 2 * (u64)SLOTS * ROW;
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    if (tile + i * step < tiles) copy_tile(ring + i * STAGE, pool + at_layer, tile + i * step, window, low, n);
    copies_commit();
  }

  // What follows until the loop is done while the first keys and values come.
  if (CLUSTER > 1) {
    if (rank == 0 && thread() == 0) bar_init(bar, 1), bars_ready(), bar_expect(bar, (ranks - 1) * GROUP * HALF * sizeof(Pair));
    cluster_arrive_only();
  }
  await_previous();
  if (CHAINED) take_heads(fresh, qkv + (u64)row * WIDE, kv, warp);
  prepare(fresh, warp, q, factors);
  sync_block();
  if (rank == 0) {
    own_scores(q, warp, own);
    // Rounded once more to bf16, and still next to the same codes.
    const float of_k = FP8 ? inverse_of(factors[0]) : 0, of_v = FP8 ? inverse_of(factors[1]) : 0;
#pragma unroll 1
    for (int i = thread(); i < HALF; i += THREADS) {
      KeptPair* there = (KeptPair*)(written + at_layer + (u64)slot * ROW) + i;
      there[0] = kept(((const u32*)k)[i], of_k), there[(u64)SLOTS * ROW / 2] = kept(((const u32*)v)[i], of_v);
    }
    if (FP8 && thread() < 2)
      *(u16*)(written + at_layer + factor_at(kv, slot / BLOCK, slot % BLOCK) + thread() * (u64)SLOTS * ROW) = (u16)factors[thread()];
  }
  u32 words[COLUMNS][STEPS][2];
  Running run;
#pragma unroll
  for (int column = 0; column < COLUMNS; column++) {
    run.peak[column][0] = run.peak[column][1] = -1e30f, run.total[column][0] = run.total[column][1] = 0;
#pragma unroll
    for (int w = 0; w < STEPS; w++) {
      // Nobody reads what comes of a column's other heads.
      const u32* from = (const u32*)(q + smaller(column * 8 + lane() / 4, GROUP - 1) * Q_PITCH + w * 16);
      const uint2 pair = FP8 ? quad(from) : uint2{from[lane() % 4], from[lane() % 4 + 4]};
      words[column][w][0] = pair.x, words[column][w][1] = pair.y;
#pragma unroll
      for (int i = 0; i < 4; i++) run.out[column][w][i] = 0;
    }
  }

  for (int stage = 0; tile < tiles; tile += step) {
    const int free = stage == 0 ? STAGES - 1 : stage - 1, later = tile + (STAGES - 1) * step;
    copies_wait<STAGES - 2>();
    // All lanes' copies are there, and nobody reads the stage before any more.
    sync_lanes();
    if (later < tiles) copy_tile(ring + free * STAGE, pool + at_layer, later, window, low, n);
    copies_commit();
    const Kept* keys = ring + stage * STAGE;
    float s[COLUMNS][4];
    uint2 p[COLUMNS];
    scores(s, keys, words);
#pragma unroll
    for (int column = 0; column < COLUMNS; column++) p[column] = shares(run, s[column], column, tile * TILE, low, n);
    weigh(run, keys + VALUES, p);
    stage = stage == STAGES - 1 ? 0 : stage + 1;
  }
  // Nothing is under way into the ring now: the parts go there.
  sync_lanes();
  keep(run, (float*)ring);
  sync_block();
  if (CLUSTER > 1) cluster_wait();
#pragma unroll 1
  for (int i = thread(); i < GROUP * HALF; i += THREADS) {
    const int head = i / HALF;
    const float* parts = (const float*)rings + head * PART;
    Pair mine = sum_of<WARPS>(WARPS, [&](int w) {
      const float* from = parts + w * STAGES * STAGE * sizeof(Kept) / 4;
      float2 ends = *(const float2*)(from + HEAD_DIM), sums = *(const float2*)(from + i % HALF * 2);
      return Pair{sums.x, sums.y, ends.x, ends.y};
    });
    if (CLUSTER > 1 && rank) {
      push16(beside(sent + (rank - 1) * GROUP * HALF + i, 0), *(const uint4*)&mine, beside(bar, 0));
      continue;
    }
    if (CLUSTER > 1 && ranks > 1) bar_wait(bar, 0);
    // The token itself, a score without a value, and parts of the context; a block that has no cluster has its own part.
    const u32 value = ((const u32*)v)[i % HALF];
    const int given = CLUSTER > 1 ? ranks : 1;
    Pair all = rank ? mine : sum_of<CLUSTER + 1 + SINKS>(given + 1 + SINKS, [&](int r) {
      if (r == 0) return Pair{first_of(value), second_of(value), own[head], 1};
      if (SINKS && r == 1) return Pair{0, 0, of_bf16(sinks[kv * GROUP + head]) * 1.4426950408889634f, 1};
      return r == 1 + SINKS ? mine : sent[(r - 2 - SINKS) * GROUP * HALF + i];
    });
    if (CLUSTER < PARTS) ((Pair*)out)[part_of(row, kv, rank) + i] = all;
    else to(i) = pack(all.x / all.total, all.y / all.total);
  }
}
