// out = x W^T of up to 64 rows and a packed W, at the speed at which its codes are read. Fragments hold codes, exactly; sums of
// a group's products are multiplied by its scale in fp32, and its minimum by the sum of its inputs. So a product's error is
// that of its fp32 sums.
//
// A block has 8 warps. N_TILES of them have different outputs, 16 M_TILES each, and the others different inputs, 128 at a time,
// whose sums are added up at the end. Blocks with different `block_y` have different inputs, too; each writes a part of the sums.

constexpr int WARPS = 8, THREADS = 32 * WARPS, WARPS_K = WARPS / N_TILES, ROWS = 8 * N_TILES;
constexpr int STEPS = IN / STEP, TILES = OUT / 16, PER_SPLIT = (STEPS + SPLITS - 1) / SPLITS;
constexpr int X_BYTES = WARPS_K * ROWS * STEP * 2, STAGE = X_BYTES + WARPS * M_TILES * CODE_BYTES;
constexpr int COLUMNS = 16 * N_TILES * M_TILES, PITCH = COLUMNS + 4;  // rows of sums begin in different banks
constexpr u32 ONES = 0x3f803f80u;

struct Warp {
  int outputs, inputs, tile;  // numbers of its outputs and inputs in the block, and its first tile
  int first, end;             // steps of the block

  METHOD Warp() {
    const int warp = thread() / 32;
    inputs = warp % WARPS_K, outputs = warp / WARPS_K;
    tile = (block_x() * N_TILES + outputs) * M_TILES;
    first = block_y() * PER_SPLIT, end = smaller(first + PER_SPLIT, STEPS);
  }
  // What stands behind the last tile is computed as if it were that, and is not kept.
  METHOD int tile_of(int m) const { return smaller(tile + m, TILES - 1); }
  METHOD int step(int chunk) const { return first + chunk * WARPS_K + inputs; }
};

// Rows of 128 inputs; 16-byte pieces stand at piece ^ row % 8. Rows that are not there hold anything: nothing of a row gets
// into another one's sums.
DEVICE void copy_chunk(u8* to, const u16* x, const u8* codes, const Warp& own, int chunk) {
  const int begin = own.first + chunk * WARPS_K, step = own.step(chunk);
  for (int i = thread(); i < WARPS_K * COUNT * 16; i += THREADS) {
    const int piece = i % 16, row = i / 16 % COUNT, k = i / 16 / COUNT;
    if (begin + k < own.end)
      copy16(to + ((k * ROWS + row) * 16 + (piece ^ row % 8)) * 16, x + (u64)row * IN + (begin + k) * STEP + piece * 8, true);
  }
  if (step >= own.end) return;
  u8* there = to + X_BYTES + thread() / 32 * M_TILES * CODE_BYTES;
#pragma unroll
  for (int m = 0; m < M_TILES; m++)
#pragma unroll
    for (int i = lane(); i < CODE_BYTES / 16; i += 32)
      copy16(there + m * CODE_BYTES + i * 16, codes + ((u64)own.tile_of(m) * STEPS + step) * CODE_BYTES + i * 16, true);
}

// Fragments of 32 inputs of 8 rows.
DEVICE void read_rows(u32* words, const u8* x, int rows, int part) {
  const int row = rows * 8 + lane() % 8;
  load_matrices(words, x + (row * 16 + ((part * 4 + lane() / 8) ^ row % 8)) * 16);
}

// Sums of each 32 inputs of the warp's own 8 rows, by a product with ones, for all warps of these inputs.
DEVICE void add_up(float* sums, const u8* x, int rows) {
#pragma unroll
  for (int part = 0; part < 4; part++) {
    u32 b[4];
    float c[4];
    read_rows(b, x, rows, part);
    mma_new(c, ONES, ONES, ONES, ONES, b[0], b[1]);
    mma(c, ONES, ONES, ONES, ONES, b[2], b[3]);
    if (lane() < 4) *(float2*)(sums + part * ROWS + rows * 8 + lane() * 2) = float2{c[0], c[1]};
  }
}

// Records of a step that a lane looks at for its quad: of outputs lane / 4 and 8 more, of every fourth group.
struct Records {
  u32 words[M_TILES][2][OWN][RECORD_WORDS];

  METHOD void ask(const u8* records, const Warp& own, int step) {
#pragma unroll
    for (int i = 0; i < M_TILES * 2 * OWN; i++) {
      const int m = i / 2 / OWN, high = i / OWN % 2, o = i % OWN;
      ask_record(words[m][high][o], records, own.tile_of(m), lane() / 4 + 8 * high, step * GROUPS + 4 * o + lane() % 4);
    }
  }
};
struct Scales {
  float2 own[M_TILES][2][OWN];

  METHOD void take(const Records& records, int step) {
#pragma unroll
    for (int i = 0; i < M_TILES * 2 * OWN; i++) {
      const int m = i / 2 / OWN, high = i / OWN % 2, o = i % OWN;
      own[m][high][o] = scale_of(records.words[m][high][o], step * GROUPS + 4 * o + lane() % 4);
    }
  }
  METHOD float2 of(int m, int high, int group) const {
    const float2 x = own[m][high][group / 4];
    const int from = (lane() & ~3) | group % 4;
    return float2{shuffle(x.x, from), MINIMA ? shuffle(x.y, from) : 0};
  }
};

// The products of 32 inputs, which are 32 / SIZE groups.
DEVICE void multiply_part(
    float (&c)[M_TILES][N_TILES][4], const u32 (&words)[M_TILES][WORDS], const Scales& scales, const u8* x, const float* sums,
    int part) {
  u32 a[M_TILES][2][4];
  float2 by[M_TILES][2][32 / SIZE];
#pragma unroll
  for (int m = 0; m < M_TILES; m++) {
#pragma unroll
    for (int i = 0; i < 8; i++) a[m][i / 4][i % 4] = fragment(words[m], part % 2 * 2 + i / 4, i % 4);
#pragma unroll
    for (int i = 0; i < 2 * (32 / SIZE); i++) by[m][i % 2][i / 2] = scales.of(m, i % 2, part * (32 / SIZE) + i / 2);
  }
#pragma unroll
  for (int n = 0; n < N_TILES; n++) {
    u32 b[4];
    read_rows(b, x, n, part);
    const float2 sum = MINIMA ? *(const float2*)(sums + part * ROWS + n * 8 + lane() % 4 * 2) : float2{0, 0};
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
      float* out = c[m][n];
#pragma unroll
      for (int group = 0; group < 32 / SIZE; group++) {
        float own[4];
        const u32* first = a[m][group];
        mma_new(own, first[0], first[1], first[2], first[3], b[2 * group], b[2 * group + 1]);
        if (SIZE == 32) mma(own, a[m][1][0], a[m][1][1], a[m][1][2], a[m][1][3], b[2], b[3]);
#pragma unroll
        for (int i = 0; i < 4; i++) out[i] += by[m][i / 2][group].x * own[i];
      }
      if (MINIMA) {
        out[0] += by[m][0][0].y * sum.x, out[1] += by[m][0][0].y * sum.y;
        out[2] += by[m][1][0].y * sum.x, out[3] += by[m][1][0].y * sum.y;
      }
    }
  }
}

DEVICE void multiply(
    float (&c)[M_TILES][N_TILES][4], const u8* codes, const Scales& scales, const u8* x, const float* sums) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    u32 words[M_TILES][WORDS];
#pragma unroll
    for (int m = 0; m < M_TILES; m++) read_codes(words[m], codes + m * CODE_BYTES, half);
    multiply_part(c, words, scales, x, sums, 2 * half);
    multiply_part(c, words, scales, x, sums, 2 * half + 1);
  }
}

DEVICE void keep(float* parts, const float (&c)[M_TILES][N_TILES][4], const Warp& own) {
  float* to = parts + (own.inputs * ROWS + lane() % 4 * 2) * PITCH + own.outputs * M_TILES * 16 + lane() / 4;
#pragma unroll
  for (int m = 0; m < M_TILES; m++)
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) to[(n * 8 + i % 2) * PITCH + m * 16 + i / 2 * 8] = c[m][n][i];
}

// Two blocks of a multiprocessor, but for sums that would not leave them registers enough.
KERNEL(packed_product, THREADS, (N_TILES * M_TILES > 8 ? 1 : 2))(const u16* x, const u8* codes, const u8* records, float* out) {
  SHARED(memory);
  const Warp own;
  const int chunks = (own.end - own.first + WARPS_K - 1) / WARPS_K;
  float* sums = (float*)(memory + STAGES * STAGE) + own.inputs * 4 * ROWS;
#pragma unroll
  for (int chunk = 0; chunk < STAGES - 1; chunk++) {
    if (chunk < chunks) copy_chunk(memory + chunk * STAGE, x, codes, own, chunk);
    copies_commit();
  }
  Records next;
  if (own.step(0) < own.end) next.ask(records, own, own.step(0));
  float c[M_TILES][N_TILES][4] = {};
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; chunk++) {
    copies_wait<STAGES - 2>();
    sync_block();
    const int later = chunk + STAGES - 1, step = own.step(chunk);
    if (later < chunks) copy_chunk(memory + later % STAGES * STAGE, x, codes, own, later);
    copies_commit();
    const u8 *stage = memory + chunk % STAGES * STAGE, *rows = stage + own.inputs * ROWS * STEP * 2;
    const bool live = step < own.end;
    if (MINIMA) {
      if (live) add_up(sums, rows, own.outputs);
      if (N_TILES > 1) sync_block();
      else sync_lanes();
    }
    if (!live) continue;
    Scales scales;
    scales.take(next, step);
    if (step + WARPS_K < own.end) next.ask(records, own, step + WARPS_K);
    multiply(c, stage + X_BYTES + thread() / 32 * M_TILES * CODE_BYTES, scales, rows, sums);
  }
  sync_block();
  float* parts = (float*)memory;
  keep(parts, c, own);
  sync_block();
  for (int i = thread(); i < COUNT * COLUMNS; i += THREADS) {
    const int row = i / COLUMNS, feature = block_x() * COLUMNS + i % COLUMNS;
    float sum = 0;
#pragma unroll
    for (int k = 0; k < WARPS_K; k++) sum += parts[(k * ROWS + row) * PITCH + i % COLUMNS];
    if (feature < OUT) out[((u64)block_y() * COUNT + row) * OUT + feature] = sum;
  }
}
