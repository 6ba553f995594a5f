// Products of rows with this block's units: each warp sums over an eighth of the inputs, then the warps' sums are added.

struct Block {
  Ring ring;
  float *sums, *squares, *mix, *angles, *norms, *residual;
  u32* heads;  // queries, a key and a value of attention
  int *table, *layer;  // the first table, the layer that is under way
  int turn, warp;
};

// To this warp's sums of `n` units: `count` chunks of rows times theirs, which come next in the ring. Sums are split, as each
// addition waits for the one before it.
DEVICE void add(Block& b, const Rows& rows, int n, int count, bool fresh) {
  constexpr int split = 2;
  int row = lane() / 4, pair = lane() % 4;
  float* own = b.sums + b.turn * SUMS_FLOATS + b.warp * (MOST_UNITS * ROWS * UNIT) + row * UNIT + 2 * pair;
#pragma unroll 1
  for (int first = 0; first < n; first += TOGETHER) {
    int many = smaller(TOGETHER, n - first);
    float c[TOGETHER][split][4] = {};
#pragma unroll
    for (int f = 0; f < FLIGHT; f++) {
      if (f >= count) break;
      const uint4* weights[TOGETHER];
#pragma unroll
      for (int i = 0; i < TOGETHER; i++)
        weights[i] = (const uint4*)b.ring.await(i < many ? i : 0) + b.warp * (WARP_STEPS / 2) * 32 + lane();
#pragma unroll
      for (int p = 0; p < WARP_STEPS / 2; p++) {
        u32 a[2][4];
#pragma unroll
        for (int s = 0; s < 2; s++)
#pragma unroll
          for (int word = 0; word < 4; word++)
            a[s][word] = WIDE || word % 2 == 0 ? rows.word(f * WARP_STEPS + 2 * p + s, word % 2, word / 2) : 0;
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) {
          uint4 w = weights[i][p * 32];
          mma(c[i][0], a[0][0], a[0][1], a[0][2], a[0][3], w.x, w.y);
          mma(c[i][1], a[1][0], a[1][1], a[1][2], a[1][3], w.z, w.w);
        }
      }
      b.ring.release(many);
    }
#pragma unroll
    for (int i = 0; i < TOGETHER; i++)
#pragma unroll
      for (int high = 0; high < (WIDE ? 2 : 1); high++) {
        if (i >= many || row + 8 * high >= ROWS) continue;
        float2* to = (float2*)(own + ((first + i) * ROWS + 8 * high) * UNIT);
        float2 old = fresh ? float2{0, 0} : *to;
        *to = float2{old.x + c[i][0][2 * high] + c[i][1][2 * high], old.y + c[i][0][2 * high + 1] + c[i][1][2 * high + 1]};
      }
  }
}

// use(i, row, quarter, x): all inputs' sums of features 4 quarter to 4 quarter + 3 of unit i, over the rows' RMS if asked for.
template <class Use> DEVICE void finish(Block& b, const Projection& p, const float (&squares)[2], int n, Use use) {
  const float* sums = b.sums + b.turn * SUMS_FLOATS;
  float* own = b.squares + b.turn * SQUARES_FLOATS;
  bool norm = p.normed();
  if (norm) {
#pragma unroll
    for (int high = 0; high < (WIDE ? 2 : 1); high++) {
      int row = lane() / 4 + 8 * high;
      float sum = squares[high];
      sum += shuffle_xor(sum, 1);
      sum += shuffle_xor(sum, 2);
      if (lane() % 4 == 0 && row < ROWS) own[b.warp * ROWS + row] = sum;
    }
  }
  sync_some(1, CONSUMERS);
#pragma unroll 1
  for (int e = thread(); e < n * ROWS * 2; e += CONSUMERS) {
    int i = e / (ROWS * 2), row = e / 2 % ROWS;
    float4 x = {0, 0, 0, 0};
    float square = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      float4 y = *(const float4*)(sums + w * (MOST_UNITS * ROWS * UNIT) + e * 4);
      x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
      square += own[w * ROWS + row];
    }
    float scale = norm ? rsqrt_of(square / p.inputs + float(RMS_EPS)) : 1;
    use(i, row, e % 2, float4{x.x * scale, x.y * scale, x.z * scale, x.w * scale});
  }
  b.turn ^= 1;
}

// This block's units of a matrix times rows that `read(rows, first, count)` has. There is one place that this is called from, for
// all matrices: instructions that are executed once a layer are fetched anew in each, and what they cost is that.
template <class Read, class Use> DEVICE void multiply(Block& b, const Projection& p, Read read, Use use) {
  Rows rows;
  float squares[2];
  bool kept = p.chunks <= FLIGHT;  // all of a row is in registers
#pragma unroll 1
  for (int group = 0; group < p.mine; group += MOST_UNITS) {
    int n = p.count(group);
    if (n == 0) break;
#pragma unroll 1
    for (int first = 0; first < p.chunks; first += FLIGHT) {
      int count = smaller(FLIGHT, p.chunks - first);
      if (group == 0 || !kept) {
        read(rows, first, count);
        if (first == 0) squares[0] = squares[1] = 0;
        if (p.normed()) rows.square(squares);
      }
      add(b, rows, n, count, first == 0);
    }
    finish(b, p, squares, n, [=](int i, int row, int q, float4 x) { use(group + i, row, q, x); });
  }
}
