// out = x W^T of up to 64 rows and a packed W, at the speed at which its codes are read. Fragments hold codes, exactly; sums of
// a group's products are multiplied by its scale in fp32, and its minimum by the sum of its inputs. So a product's error is
// that of its fp32 sums.
//
// A block has 8 warps. TEAM of them have different outputs, 16 M_TILES each, and share the rows that they read. The teams have
// different inputs, 128 at a time, and wait for each other only where their sums are added up. A block takes one group of
// outputs after the other, and what the next one reads is on its way before. Blocks with different `block_y` have different
// inputs, too; each writes a part of the sums.

constexpr int WARPS = 8, THREADS = 32 * WARPS, TEAMS = WARPS / TEAM, ROWS = 8 * N_TILES;
constexpr int STEPS = IN / STEP, TILES = OUT / 16, PER_SPLIT = (STEPS + SPLITS - 1) / SPLITS;
constexpr int COLUMNS = 16 * TEAM * M_TILES, PITCH = COLUMNS + 4;  // rows of sums begin in different banks
constexpr int OUTPUTS = (OUT + COLUMNS - 1) / COLUMNS;                // groups of them
// Bytes of a step: a team's rows, a warp's codes and records.
constexpr int X_BYTES = COUNT * STEP * 2, W_BYTES = M_TILES * (CODE_BYTES + RECORD_BYTES);
constexpr int STAGE = TEAMS * X_BYTES + WARPS * W_BYTES;
constexpr u32 ONES = 0x3f803f80u;

struct Warp {
  int outputs, inputs;  // numbers of its outputs in the team and of its team
  int first, end;       // steps of the block

  METHOD Warp() {
    const int warp = thread() / 32;
    inputs = warp % TEAMS, outputs = warp / TEAMS;
    first = block_y() * PER_SPLIT, end = smaller(first + PER_SPLIT, STEPS);
  }
  METHOD int step(int chunk) const { return first + chunk * TEAMS + inputs; }
  METHOD int chunks() const { return (end - first + TEAMS - 1) / TEAMS; }
  // Of a group of outputs; what stands behind the last tile is computed as if it were that, and is not kept.
  METHOD int tile(int group, int m) const { return smaller((group * TEAM + outputs) * M_TILES + m, TILES - 1); }
  METHOD void meet() const {
    if (TEAM == 1) sync_lanes();
    else if (TEAM == WARPS) sync_block();
    else sync_some(1 + inputs, 32 * TEAM);
  }
};

// A step: of which group of outputs, and which of the block's chunks.
struct Place {
  int group, chunk;

  // Whether another group begins.
  METHOD bool next(int chunks) {
    if (++chunk < chunks) return false;
    chunk = 0, group += GRID;
    return true;
  }
};

// Copies of the steps in their order, from where a lane's first 16 bytes of a row, a tile and its records are.
struct Copies {
  Place at;
  const u16* x;
  const u8 *codes[M_TILES], *records[M_TILES];

  METHOD void begin(const Warp& own, const u8* all_codes, const u8* all_records) {
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
      const u64 tile = own.tile(at.group, m);
      codes[m] = all_codes + tile * STEPS * CODE_BYTES + lane() * 16;
      records[m] = all_records + tile * BLOCKS * 16 * RECORD + lane() * 16;
    }
  }
  // Rows of 128 inputs; 16-byte pieces stand at piece ^ row % 8.
  METHOD void copy(u8* stage, const Warp& own) const {
    const int step = own.step(at.chunk);
    if (at.group >= OUTPUTS || step >= own.end) return;
    u8* rows = stage + own.inputs * X_BYTES;
#pragma unroll
    for (int i = 0; i < (COUNT * 16 + 32 * TEAM - 1) / (32 * TEAM); i++) {
      const int all = i * 32 * TEAM + own.outputs * 32 + lane(), row = all / 16, piece = all % 16;
      if (row < COUNT) copy16(rows + (row * 16 + (piece ^ row % 8)) * 16, x + i * 2 * TEAM * IN + step * STEP, true);
    }
    u8* weights = stage + TEAMS * X_BYTES + thread() / 32 * W_BYTES + lane() * 16;
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
      for (int i = 0; i < CODE_BYTES; i += 512) copy16(weights + m * CODE_BYTES + i, codes[m] + step * CODE_BYTES + i, true);
#pragma unroll
      for (int i = 0; i < RECORD_BYTES; i += 512)
        if (lane() * 16 + i < RECORD_BYTES)
          copy16(weights + M_TILES * CODE_BYTES + m * RECORD_BYTES + i, records[m] + records_at(step) + i, true);
    }
  }
};

// Fragments of 32 inputs of 8 rows; in the place of rows that are not there the last one, whose sums nobody keeps.
DEVICE void read_rows(u32* words, const u8* x, int rows, int part) {
  const int row = smaller(rows * 8 + lane() % 8, COUNT - 1);
  load_matrices(words, x + (row * 16 + ((part * 4 + lane() / 8) ^ row % 8)) * 16);
}

// Sums of each 32 inputs of rows, by a product with ones: each warp of the team has every TEAM-th part of 8 rows.
DEVICE void add_up(float* sums, const u8* x, const Warp& own) {
#pragma unroll
  for (int i = 0; i < 4 * N_TILES; i += TEAM) {
    const int part = (i + own.outputs) % 4, rows = (i + own.outputs) / 4;
    if (4 * N_TILES % TEAM && rows >= N_TILES) break;
    u32 b[4];
    float c[4];
    read_rows(b, x, rows, part);
    mma_new(c, ONES, ONES, ONES, ONES, b[0], b[1]);
    mma(c, ONES, ONES, ONES, ONES, b[2], b[3]);
    if (lane() < 4) *(float2*)(sums + part * ROWS + rows * 8 + lane() * 2) = float2{c[0], c[1]};
  }
}

// Scales of a step that a lane decodes for its quad: of outputs lane / 4 and 8 more, of every fourth group.
struct Scales {
  float2 own[M_TILES][2][OWN];

  METHOD void take(const u8* records, int step) {
#pragma unroll
    for (int i = 0; i < M_TILES * 2 * OWN; i++) {
      const int m = i / 2 / OWN, high = i / OWN % 2, o = i % OWN;
      own[m][high][o] = scale_of(records + m * RECORD_BYTES, lane() / 4 + 8 * high, step, 4 * o + lane() % 4);
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

DEVICE void multiply(float (&c)[M_TILES][N_TILES][4], const u8* weights, int step, const u8* x, const float* sums) {
  Scales scales;
  scales.take(weights + M_TILES * CODE_BYTES, step);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    u32 words[M_TILES][WORDS];
#pragma unroll
    for (int m = 0; m < M_TILES; m++) read_codes(words[m], weights + m * CODE_BYTES, half);
    multiply_part(c, words, scales, x, sums, 2 * half);
    multiply_part(c, words, scales, x, sums, 2 * half + 1);
  }
}

// The teams' sums of a group of outputs, added up in order, and zeros in their place.
DEVICE void finish(float (&c)[M_TILES][N_TILES][4], float* parts, u8* out, const Warp& own, int group) {
  float* to = parts + (own.inputs * ROWS + lane() % 4 * 2) * PITCH + own.outputs * M_TILES * 16 + lane() / 4;
#pragma unroll
  for (int m = 0; m < M_TILES; m++)
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) to[(n * 8 + i % 2) * PITCH + m * 16 + i / 2 * 8] = c[m][n][i], c[m][n][i] = 0;
  sync_block();
  for (int i = thread(); i < COUNT * COLUMNS / 2; i += THREADS) {
    const int row = i / (COLUMNS / 2), column = i % (COLUMNS / 2) * 2, feature = group * COLUMNS + column;
    float2 sum = {0, 0};
#pragma unroll
    for (int k = 0; k < TEAMS; k++) {
      const float2 part = *(const float2*)(parts + (k * ROWS + row) * PITCH + column);
      sum.x += part.x, sum.y += part.y;
    }
    const u64 at = ((u64)block_y() * COUNT + row) * OUT + feature;
    if (feature >= OUT) continue;
    if (EXACT) *(float2*)((float*)out + at) = sum;
    else *(u32*)((u16*)out + at) = pack(sum.x, sum.y);
  }
  // Before anybody's next sums.
  sync_block();
}

KERNEL(packed_product, THREADS, 2)(const u16* x, const u8* codes, const u8* records, u8* out) {
  SHARED(memory);
  const Warp own;
  const int chunks = own.chunks();
  float *parts = (float*)(memory + STAGES * STAGE), *sums = parts + TEAMS * ROWS * PITCH + own.inputs * 4 * ROWS;
  Place now = {block_x(), 0};
  const int first = own.outputs * 32 + lane();  // 16 bytes of the team's rows
  Copies later = {now, x + (u64)(first / 16) * IN + first % 16 * 8};
  later.begin(own, codes, records);
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; stage++) {
    later.copy(memory + stage * STAGE, own);
    copies_commit();
    if (later.at.next(chunks)) later.begin(own, codes, records);
  }
  float c[M_TILES][N_TILES][4] = {};
#pragma unroll 1
  for (int stage = 0; now.group < OUTPUTS; stage = stage == STAGES - 1 ? 0 : stage + 1) {
    copies_wait<STAGES - 2>();
    own.meet();
    later.copy(memory + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE, own);
    copies_commit();
    if (later.at.next(chunks)) later.begin(own, codes, records);
    const u8 *rows = memory + stage * STAGE + own.inputs * X_BYTES;
    const int step = own.step(now.chunk);
    if (step < own.end) {
      if (MINIMA) {
        add_up(sums, rows, own);
        own.meet();
      }
      multiply(c, memory + stage * STAGE + TEAMS * X_BYTES + thread() / 32 * W_BYTES, step, rows, sums);
    }
    const int group = now.group;
    if (now.next(chunks)) finish(c, parts, out, own, group);
  }
}
