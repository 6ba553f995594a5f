// Products of rows with this block's units: each warp sums over an eighth of the inputs, then the warps' sums are added.

struct Block {
  Ring ring;
  float *sums, *squares, *mix, *angles, *norms, *residual;
  u32* heads;  // queries, a key and a value of attention
  int *table, *layer;  // the first table, the layer that is under way
  int turn, warp;

  // Of a matrix: units of this block from its `first` on, `most` at most.
  template <class M> METHOD int count(int first, int most) const {
    return larger(0, smaller(most, (M::units - 1 - block_x_now() + GRID) / GRID - first));
  }
};

// A warp's share of a chunk's weights of `n` units, whose slots come next in the ring.
template <class M, int N> struct Weights {
  static constexpr int pairs = M::steps / WARPS / 2;
  uint4 word[N][pairs];

  METHOD void take(Ring& ring, int warp, int n) {
#pragma unroll
    for (int i = 0; i < N; i++) {
      const uint4* from = (const uint4*)ring.await(i < n ? i : 0) + warp * pairs * 32 + lane();
#pragma unroll
      for (int p = 0; p < pairs; p++) word[i][p] = from[p * 32];
    }
  }
};

// c += rows times units; the sums of a unit are split, as each addition waits for the one before it.
template <class M, int N, int S> DEVICE void add(const Rows<M>& rows, const Weights<M, N>& weights, float (&c)[N][S][4]) {
#pragma unroll
  for (int p = 0; p < M::steps / WARPS / 2; p++) {
    u32 a[2][4];
#pragma unroll
    for (int s = 0; s < 2; s++)
#pragma unroll
      for (int own = 0; own < 4; own++) a[s][own] = WIDE || own % 2 == 0 ? rows.word(2 * p + s, own % 2, own / 2) : 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
      uint4 w = weights.word[i][p];
      mma(c[i][2 * p % S], a[0][0], a[0][1], a[0][2], a[0][3], w.x, w.y);
      mma(c[i][(2 * p + 1) % S], a[1][0], a[1][1], a[1][2], a[1][3], w.z, w.w);
    }
  }
}

// The same with the chunk's weights of `n` units that come next in the ring.
template <class M, int N, int S> DEVICE void add_next(Block& b, const Rows<M>& rows, float (&c)[N][S][4], int n) {
  Weights<M, N> weights;
  weights.take(b.ring, b.warp, n);
  add<M, N, S>(rows, weights, c);
  b.ring.release(n);
}

// use(i, row, quarter, x): all inputs' sums of features 4 quarter to 4 quarter + 3 of unit i; over the rows' RMS if NORM.
template <class M, int N, int S, bool NORM, class Use>
DEVICE void finish(Block& b, const float (&c)[N][S][4], const float (&squares)[2], int n, Use use) {
  float* sums = b.sums + b.turn * SUMS_FLOATS;
  float* own = b.squares + b.turn * SQUARES_FLOATS;
  int row = lane() / 4, pair = lane() % 4;
#pragma unroll
  for (int high = 0; high < (WIDE ? 2 : 1); high++) {
    if (row + 8 * high >= ROWS) continue;
#pragma unroll
    for (int i = 0; i < N; i++) {
      float x = 0, y = 0;
#pragma unroll
      for (int s = 0; s < S; s++) x += c[i][s][2 * high], y += c[i][s][2 * high + 1];
      if (i < n) *(float2*)(sums + ((b.warp * N + i) * ROWS + row + 8 * high) * UNIT + 2 * pair) = float2{x, y};
    }
  }
  if (NORM) {
#pragma unroll
    for (int high = 0; high < (WIDE ? 2 : 1); high++) {
      float sum = squares[high];
      sum += shuffle_xor(sum, 1);
      sum += shuffle_xor(sum, 2);
      if (pair == 0 && row + 8 * high < ROWS) own[b.warp * ROWS + row + 8 * high] = sum;
    }
  }
  sync_some(1, CONSUMERS);
  for (int e = thread(); e < n * ROWS * 2; e += CONSUMERS) {
    int i = e / (ROWS * 2), row = e / 2 % ROWS;
    float4 x = {0, 0, 0, 0};
    float square = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      float4 y = *(const float4*)(sums + w * N * ROWS * UNIT + e * 4);
      x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
      if (NORM) square += own[w * ROWS + row];
    }
    float scale = NORM ? rsqrt_of(square / M::in + float(RMS_EPS)) : 1;
    use(i, row, e % 2, float4{x.x * scale, x.y * scale, x.z * scale, x.w * scale});
  }
  b.turn ^= 1;
}

// Chunks of rows that are on their way at once.
#define FLIGHT (WIDE ? 3 : 6)

// A group of this block's units of a matrix, of rows that other blocks write to `words` meanwhile.
template <class M, bool NORM, class Use> DEVICE void product_group(Block& b, const u32* words, int unit, Use use) {
  constexpr int N = M::group, S = N == 1 ? 4 : 2;
  int n = b.count<M>(unit, N);
  if (n == 0) return;
  float c[N][S][4] = {}, squares[2] = {};
#pragma unroll
  for (int first = 0; first < M::chunks; first += FLIGHT) {
    constexpr int most = M::chunks < FLIGHT ? M::chunks : FLIGHT;
    Rows<M> rows[most];
    Weights<M, N> weights;
    // The first ones are in registers before the rows are there, which everything waits for. Their slots are given back when
    // they have been used: the copy engine would overtake loads that are on their way.
    weights.take(b.ring, b.warp, n);
    read_all(rows, words, first, b.warp);
#pragma unroll
    for (int i = 0; i < most; i++)
      if (first + i < M::chunks) {
        if (i > 0) weights.take(b.ring, b.warp, n);
        if (NORM) rows[i].square(squares);
        add<M, N, S>(rows[i], weights, c);
        b.ring.release(n);
      }
  }
  finish<M, N, S, NORM>(b, c, squares, n, [=](int i, int row, int q, float4 x) { use(unit + i, row, q, x); });
}
template <class M, bool NORM, class Use> DEVICE void product(Block& b, const u32* words, Use use) {
  for (int unit = 0; unit < M::mine; unit += M::group) product_group<M, NORM>(b, words, unit, use);
}
