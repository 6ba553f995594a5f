// out = x W^T of at most 16 rows, at the speed at which W is read: with or without an RMSNorm before it, a bias and a residual
// after it. A block has OUTS outputs; its warps take chunks of 32 inputs in turn and their sums are added up at the end, in
// order. Every lane copies to shared memory what it itself will read, so that nobody waits for anybody until then.
//
// The order of a chunk's inputs is the lanes': lane 4 g + t has inputs 8 t to 8 t + 7 of row g of x, and of output g of a column
// of eight, which are its words of two products of 16 inputs. A sum does not mind. The norm's weights are multiplied into x
// here, and the root of the mean of squares divides the sums.

constexpr int THREADS = WARPS * 32, CHUNK = 32, CHUNKS = IN / CHUNK;
constexpr int COLUMNS = OUTS / 8, HALVES = (ROWS + 7) / 8;
// Pieces of 16 bytes that a lane has of a chunk: of weights, of x, and of the norm's weights.
constexpr int PIECES = COLUMNS + HALVES + NORM, STAGE = PIECES * 32;
// In floats, of a warp: sums of all rows and outputs, and then squares of the rows.
constexpr int SUMS = HALVES * 8 * OUTS;
static_assert((SUMS + HALVES * 8) * 4 <= STAGES * STAGE * 16, "a warp's sums take the place of its ring");

// Rows behind the last one are zeros.
DEVICE void copy_chunk(uint4* stage, const u16* x, const u16* weight, const u16* norm, int first, int chunk) {
  const int at = chunk * CHUNK + lane() % 4 * 8;
#pragma unroll
  for (int i = 0; i < COLUMNS; i++) {
    const int output = first + i * 8 + lane() / 4;
    copy16(stage + i * 32, weight + (u64)output * IN + at, output < OUT);
  }
#pragma unroll
  for (int i = 0; i < HALVES; i++) {
    const int row = i * 8 + lane() / 4;
    copy16(stage + (COLUMNS + i) * 32, x + (u64)row * IN + at, row < ROWS);
  }
  if (NORM) copy16(stage + (COLUMNS + HALVES) * 32, norm + at, true);
}
DEVICE u32 scaled(u32 x, u32 by, float& squares) {
  const float a = first_of(x), b = second_of(x);
  squares += a * a + b * b;
  return pack(a * first_of(by), b * second_of(by));
}
DEVICE uint4 scaled(uint4 x, uint4 by, float& squares) {
  return {scaled(x.x, by.x, squares), scaled(x.y, by.y, squares), scaled(x.z, by.z, squares), scaled(x.w, by.w, squares)};
}

// A warp's sums over its chunks, of column i the words of mma.
DEVICE void multiply(
    float (&sums)[COLUMNS][4], float (&squares)[2], uint4* ring, const u16* x, const u16* weight, const u16* norm, int first) {
  const int warp = thread() / 32;
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    if (warp + i * WARPS < CHUNKS) copy_chunk(ring + i * STAGE, x, weight, norm, first, warp + i * WARPS);
    copies_commit();
  }
#pragma unroll 1
  for (int chunk = warp, stage = 0; chunk < CHUNKS; chunk += WARPS) {
    const int free = stage == 0 ? STAGES - 1 : stage - 1, later = chunk + (STAGES - 1) * WARPS;
    copies_wait<STAGES - 2>();
    const uint4* from = ring + stage * STAGE;
    uint4 rows[2] = {}, w[COLUMNS];
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) w[i] = from[i * 32];
#pragma unroll
    for (int i = 0; i < HALVES; i++) {
      rows[i] = from[(COLUMNS + i) * 32];
      if (NORM) rows[i] = scaled(rows[i], from[(COLUMNS + HALVES) * 32], squares[i]);
    }
    if (later < CHUNKS) copy_chunk(ring + free * STAGE, x, weight, norm, first, later);
    copies_commit();
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) {
      mma(sums[i], rows[0].x, rows[1].x, rows[0].y, rows[1].y, w[i].x, w[i].y);
      mma(sums[i], rows[0].z, rows[1].z, rows[0].w, rows[1].w, w[i].z, w[i].w);
    }
    stage = stage == STAGES - 1 ? 0 : stage + 1;
  }
}
// The sums of a warp to where its ring was.
DEVICE void keep(const float (&sums)[COLUMNS][4], const float (&squares)[2], float* part) {
#pragma unroll
  for (int half = 0; half < HALVES; half++) {
    const int row = half * 8 + lane() / 4;
#pragma unroll
    for (int i = 0; i < COLUMNS; i++)
      *(float2*)(part + row * OUTS + i * 8 + lane() % 4 * 2) = float2{sums[i][2 * half], sums[i][2 * half + 1]};
    float square = squares[half];
    square += shuffle_xor(square, 1);
    square += shuffle_xor(square, 2);
    if (NORM && lane() % 4 == 0) part[SUMS + row] = square;
  }
}

KERNEL(skinny_product, THREADS, 1)(
    const u16* x, const u16* weight, const u16* norm, const u16* bias, const u16* residual, u8* out) {
  SHARED(memory);
  const int first = block_x() * OUTS;
  uint4* ring = (uint4*)memory + thread() / 32 * STAGES * STAGE;
  float sums[COLUMNS][4] = {}, squares[2] = {};
  multiply(sums, squares, ring + lane(), x, weight, norm, first);
  // No lane reads the ring any more.
  sync_lanes();
  keep(sums, squares, (float*)ring);
  sync_block();
  // Two outputs of a row.
#pragma unroll 1
  for (int e = thread(); e < ROWS * OUTS / 2; e += THREADS) {
    const int row = e / (OUTS / 2), column = e % (OUTS / 2) * 2, output = first + column;
    if (output >= OUT) continue;
    float a = 0, b = 0, square = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float* part = (const float*)((uint4*)memory + w * STAGES * STAGE);
      const float2 own = *(const float2*)(part + row * OUTS + column);
      a += own.x, b += own.y;
      if (NORM) square += part[SUMS + row];
    }
    const float scale = NORM ? rsqrt_of(square * (1.f / IN) + (float)(EPS)) : 1;
    a *= scale, b *= scale;
    const u64 at = (u64)row * OUT + output;
    if (BIAS) {
      const u32 word = *(const u32*)(bias + output);
      a += first_of(word), b += second_of(word);
    }
    if (RESIDUAL) {
      const u32 word = *(const u32*)(residual + at);
      a += first_of(word), b += second_of(word);
    }
    if (EXACT) *(float2*)((float*)out + at) = float2{a, b};
    else *(u32*)((u16*)out + at) = pack(a, b);
  }
}
