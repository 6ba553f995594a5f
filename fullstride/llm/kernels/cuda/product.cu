// out = x W^T of up to 128 rows, at the speed at which W is read: with the norm or nothing before it, a bias, the residual stream
// or SwiGLU after it. A block has TILE outputs and a SLICE of the inputs, so that it reads little of x; the blocks of a cluster
// have the same outputs, and each adds up their parts for some of the rows, in order. In a chain the weights are
// under way, or there, before x is.

constexpr int SLICE = IN / CLUSTER, CHUNK = 64, CHUNKS = SLICE / CHUNK, SLABS = ROWS / 32;
// Four warps have 64 outputs, of all chunks or of every K_GROUPS-th.
constexpr int THREADS = 128 * GROUPS, N_GROUPS = TILE / 64, K_GROUPS = GROUPS / N_GROUPS;
constexpr int PIECES = SLICE / 8;  // 16 bytes of a row's slice
constexpr int W_BYTES = TILE * 128, X_BYTES = ROWS * 128;  // of a chunk
constexpr int HELD = STAGES < CHUNKS ? STAGES : CHUNKS;  // chunks of weights in shared memory
// In floats; rows of parts begin in different banks.
constexpr int PITCH = TILE + 4, PART = ROWS * PITCH;
constexpr int OWN_ROWS = ROWS / CLUSTER, WIDE = GATED ? OUT / 2 : OUT;

// Where 16 bytes of a chunk's row are.
DEVICE int place(int row, int piece) { return row * 128 + (piece ^ row % 8) * 16; }

// Of the tile: gates and then as many ups, or outputs one after the other.
DEVICE int weight_row(int tile, int i) {
  if (!GATED) return tile * TILE + i;
  return (i < TILE / 2 ? 0 : OUT / 2 - TILE / 2) + tile * (TILE / 2) + i;
}
DEVICE void copy_weights(u8* stage, const u16* weight, int tile, int first, int chunk) {
  if (chunk < CHUNKS) {
#pragma unroll
    for (int i = thread(); i < TILE * 8; i += THREADS) {
      int row = i / 8, piece = i % 8;
      copy16(stage + place(row, piece), weight + (u64)weight_row(tile, row) * IN + first + chunk * CHUNK + piece * 8, true);
    }
  }
  copies_commit();
}

DEVICE float square(u32 word) { return first_of(word) * first_of(word) + second_of(word) * second_of(word); }
DEVICE u32 scaled(u32 word, u32 by) { return pack(first_of(word) * first_of(by), second_of(word) * second_of(by)); }

// This block's slice of all rows, times the norm's weights; zeros behind the last row.
DEVICE void take_rows(u8* to, const u16* x, const uint4* norm, int first, float* squares) {
  constexpr int LANES = THREADS / ROWS >= 8 ? 8 : THREADS / ROWS >= 4 ? 4 : 2, EACH = PIECES / LANES;
  static_assert(PIECES % LANES == 0 && THREADS >= 2 * ROWS, "a row's slice is no multiple of its threads'");
  const int row = thread() / LANES, part = thread() % LANES;
  if (row >= ROWS) return;
  uint4 words[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++)
    words[i] = row < COUNT ? load_now((const uint4*)(x + (u64)row * IN + first) + part + i * LANES) : uint4{0, 0, 0, 0};
  float sum = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int piece = part + i * LANES;
    uint4 w = words[i];
    if (NORM) {
      sum += (square(w.x) + square(w.y)) + (square(w.z) + square(w.w));
      const uint4 by = norm[piece];
      w = uint4{scaled(w.x, by.x), scaled(w.y, by.y), scaled(w.z, by.z), scaled(w.w, by.w)};
    }
    *(uint4*)(to + piece / 8 * X_BYTES + place(row, piece % 8)) = w;
  }
  if (!NORM) return;
#pragma unroll
  for (int mask = 1; mask < LANES; mask <<= 1) sum += shuffle_xor(sum, mask);
  if (part == 0) squares[row] = sum;
}

// The chunks' products; the ring is filled again behind them where it is shorter than the slice, which otherwise is all
// under way from the beginning.
DEVICE void multiply(float (&c)[SLABS][16], u8* ring, const u8* x, const u16* weight, int tile, int first) {
  const int group = thread() / 128, n = group % N_GROUPS, k = group / N_GROUPS;
#pragma unroll 1
  for (int chunk = 0; chunk < CHUNKS; chunk++) {
    copies_wait<STAGES - 2>();
    shared_ready();
    products_wait();
    sync_block();
    copy_weights(ring + (chunk + STAGES - 1) % STAGES * W_BYTES, weight, tile, first, chunk + STAGES - 1);
    if (chunk % K_GROUPS != k) continue;
    const u8 *w = ring + chunk % STAGES * W_BYTES + n * 64 * 128, *rows = x + chunk * X_BYTES;
    products_begin();
#pragma unroll
    for (int step = 0; step < CHUNK / 16; step++)
#pragma unroll
      for (int slab = 0; slab < SLABS; slab++) product_64_32(c[slab], w, rows + slab * 32 * 128, step);
    products_commit();
  }
  products_wait();
}

DEVICE void keep(float* parts, const float (&c)[SLABS][16]) {
  const int group = thread() / 128, n = group % N_GROUPS, k = group / N_GROUPS;
  const int output = n * 64 + thread() % 128 / 32 * 16 + lane() / 4;
  float* to = parts + k * PART + output;
#pragma unroll
  for (int slab = 0; slab < SLABS; slab++)
#pragma unroll
    for (int i = 0; i < 16; i++) {
      int row = slab * 32 + i / 4 * 8 + lane() % 4 * 2 + i % 2;
      to[row * PITCH + i % 4 / 2 * 8] = c[slab][i];
    }
}

// Four outputs of a row, of all parts.
DEVICE float4 total(float* parts, int at) {
  float4 x[CLUSTER * K_GROUPS], sum = {0, 0, 0, 0};
#pragma unroll
  for (int p = 0; p < CLUSTER * K_GROUPS; p++)
    x[p] = *(const float4*)((CLUSTER > 1 ? of_block(parts, p / K_GROUPS) : parts) + p % K_GROUPS * PART + at);
#pragma unroll
  for (int p = 0; p < CLUSTER * K_GROUPS; p++) sum.x += x[p].x, sum.y += x[p].y, sum.z += x[p].z, sum.w += x[p].w;
  return sum;
}
DEVICE float rms_scale(float* squares, int row) {
  float sum = 0;
#pragma unroll
  for (int p = 0; p < CLUSTER; p++) sum += (CLUSTER > 1 ? of_block(squares, p) : squares)[row];
  return rsqrt_of(sum * (1.f / IN) + (float)(EPS));
}
DEVICE float silu(float x) { return x / (1 + exp2_of(-1.4426950408889634f * x)); }

DEVICE void finish(float* parts, float* squares, int rank, int tile, const u16* bias, u16* out) {
  constexpr int COLUMNS = (GATED ? TILE / 2 : TILE) / 4;
  const int first = rank * OWN_ROWS;
#pragma unroll 1
  for (int e = thread(); e < OWN_ROWS * COLUMNS; e += THREADS) {
    const int row = first + e / COLUMNS, column = e % COLUMNS * 4;
    if (row >= COUNT) break;
    float4 x = total(parts, row * PITCH + column);
    const float scale = NORM ? rms_scale(squares, row) : 1;
    x = float4{x.x * scale, x.y * scale, x.z * scale, x.w * scale};
    if (GATED) {
      float4 y = total(parts, row * PITCH + TILE / 2 + column);
      // As the plain kernels round them.
      u32 gates[2] = {pack(x.x, x.y), pack(x.z, x.w)}, ups[2] = {pack(y.x * scale, y.y * scale), pack(y.z * scale, y.w * scale)};
      x = float4{silu(first_of(gates[0])) * first_of(ups[0]), silu(second_of(gates[0])) * second_of(ups[0]),
                 silu(first_of(gates[1])) * first_of(ups[1]), silu(second_of(gates[1])) * second_of(ups[1])};
    }
    const int feature = tile * COLUMNS * 4 + column;
    if (BIAS) {
      uint2 by = *(const uint2*)(bias + feature);
      x.x += first_of(by.x), x.y += second_of(by.x), x.z += first_of(by.y), x.w += second_of(by.y);
    }
    uint2* to = (uint2*)(out + (u64)row * WIDE + feature);
    if (RESIDUAL) {
      uint2 old = load_now(to);
      x.x += first_of(old.x), x.y += second_of(old.x), x.z += first_of(old.y), x.w += second_of(old.y);
    }
    *to = uint2{pack(x.x, x.y), pack(x.z, x.w)};
  }
}

CLUSTER_KERNEL(product, THREADS, 1, CLUSTER)(
    const u16* x, const u16* weight, const uint4* norm, const u16* bias, u16* out) {
  SHARED(memory);
  u8 *ring = memory, *rows = ring + HELD * W_BYTES;
  float *parts = (float*)memory, *squares = (float*)(memory + AFTER);
  uint4* norm_slice = (uint4*)(squares + ROWS);
  const int rank = block_x() % CLUSTER, tile = block_x() / CLUSTER, first = rank * SLICE;
  let_next_begin();
  if (NORM)
    for (int i = thread(); i < PIECES; i += THREADS) copy16(norm_slice + i, norm + first / 8 + i, true);
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; stage++) copy_weights(ring + stage * W_BYTES, weight, tile, first, stage);
  await_previous();
  if (NORM) {
    // The first group has the norm's weights in it.
    copies_wait<STAGES - 2>();
    sync_block();
  }
  take_rows(rows, x, norm_slice, first, squares);
  float c[SLABS][16] = {};
  multiply(c, ring, rows, weight, tile, first);
  sync_block();
  keep(parts, c);
  if (CLUSTER > 1) cluster_arrive(), cluster_wait();
  else sync_block();
  finish(parts, squares, rank, tile, bias, out);
  // Nobody ends while others read of it.
  if (CLUSTER > 1) cluster_arrive_only(), cluster_wait();
}
