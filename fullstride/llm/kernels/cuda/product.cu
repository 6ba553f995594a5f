// out = x W^T of up to 128 rows, at the speed at which W is read: with or without a norm before it, a bias, the residual stream
// or SwiGLU after it. A block has TILE outputs and a SLICE of the inputs, so that it reads little of x; the blocks of a cluster
// have the same outputs, and each adds up their parts for some of the rows, in order. In a chain the weights are
// under way, or there, before x is.
//
// A norm is two things: its weights are multiplied into x by whoever writes x (`scaled`), and the rows' sums of
// squares, of 64 inputs each, say what the results are divided by.

constexpr int SLICE = IN / CLUSTER, CHUNK = 64, CHUNKS = SLICE / CHUNK;
// Four warps have 64 rows and half of the outputs.
constexpr int SLABS = (ROWS + 63) / 64, THREADS = 256 * SLABS, WORDS = TILE / 4;
constexpr int W_BYTES = TILE * 128, X_BYTES = SLABS * 64 * 128;  // of a chunk
constexpr bool AGAIN = STAGES < CHUNKS;  // shared memory has fewer chunks of weights than there are
// In floats; rows of parts begin in different banks.
constexpr int PITCH = TILE + 8, OWN_ROWS = ROWS / CLUSTER, INBOX = OWN_ROWS * PITCH;
// Other blocks' parts come where chunks but for the last one were, this block's own where rows were.
constexpr int LAST = (CHUNKS - 1) % STAGES, INBOX_AT = LAST == 0 ? W_BYTES : 0;
static_assert(CLUSTER == 1 || LAST == 0 || LAST == STAGES - 1, "the last chunk is in the middle of the ring");
static_assert((CLUSTER - 1) * INBOX * 4 <= (STAGES - 1) * W_BYTES && INBOX * 4 <= CHUNKS * X_BYTES, "no room for parts");
constexpr int WIDE = GATED ? OUT / 2 : OUT, GROUP = 64, SQUARES = IN / GROUP;  // outputs of a sum of squares

// Where 16 bytes of a chunk's row are.
DEVICE int place(int row, int piece) { return row * 128 + (piece ^ row % 8) * 16; }

// Of the tile: gates and then as many ups, or outputs one after the other.
DEVICE int weight_row(int tile, int i) {
  if (!GATED) return tile * TILE + i;
  return (i < TILE / 2 ? 0 : OUT / 2 - TILE / 2) + tile * (TILE / 2) + i;
}
DEVICE void copy_weights(u8* ring, const u16* weight, int tile, int first, int chunk) {
  u8* stage = ring + chunk % STAGES * W_BYTES;
#pragma unroll
  for (int i = thread(); i < TILE * 8; i += THREADS) {
    int row = i / 8, piece = i % 8;
    copy16(stage + place(row, piece), weight + (u64)weight_row(tile, row) * IN + first + chunk * CHUNK + piece * 8, true);
  }
}
// Zeros behind the last row.
DEVICE void copy_rows(u8* rows, const u16* x, int first, int chunk) {
#pragma unroll
  for (int i = thread(); i < SLABS * 64 * 8; i += THREADS) {
    int row = i / 8, piece = i % 8;
    copy16(rows + chunk * X_BYTES + place(row, piece), x + (u64)row * IN + first + chunk * CHUNK + piece * 8, row < COUNT);
  }
}

struct Operands {
  u8 *ring, *rows;
  const u16* weight;
  int tile, first;
};

DEVICE void multiply_chunk(float (&c)[WORDS], const Operands& o, int chunk) {
  const int group = thread() / 128;
  const u8* w = o.ring + chunk % STAGES * W_BYTES + group % 2 * (TILE / 2) * 128;
  const u8* rows = o.rows + chunk * X_BYTES + group / 2 * 64 * 128;
#pragma unroll
  for (int step = 0; step < CHUNK / 16; step++) product_64(c, rows, w, step);
}
// The chunks' products as they come, the ring being filled again behind them.
template <int C> DEVICE void multiply(float (&c)[WORDS], const Operands& o) {
  if constexpr (C < CHUNKS) {
    // Copies that may still be under way: of later chunks of rows, then of weights again.
    copies_wait<C == 0 ? CHUNKS - 1 : C < STAGES ? CHUNKS - 2 : STAGES - 2>();
    shared_ready();
    products_wait();
    sync_block();
    if (C > 0) {
      if (C + STAGES - 1 < CHUNKS) copy_weights(o.ring, o.weight, o.tile, o.first, C + STAGES - 1);
      copies_commit();
    }
    if (CLUSTER > 1 && C == CHUNKS - 1) cluster_arrive();
    products_begin();
    multiply_chunk(c, o, C);
    products_commit();
    multiply<C + 1>(c, o);
  }
}
// The same where all chunks are in shared memory: all but the last one, and then that.
DEVICE void multiply_all(float (&c)[WORDS], const Operands& o) {
  copies_wait<1>();
  shared_ready();
  sync_block();
  products_begin();
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS - 1; chunk++) multiply_chunk(c, o, chunk);
  products_commit();
  copies_wait<0>();
  shared_ready();
  products_wait();
  sync_block();
  // Nobody reads of the first chunks any more: others may write there.
  if (CLUSTER > 1) cluster_arrive();
  products_begin();
  multiply_chunk(c, o, CHUNKS - 1);
  products_commit();
}

// Four outputs of a row at a time to the block that adds up that row's: two lanes swap halves, so that each has all four.
DEVICE void hand_over(float (&c)[WORDS], float* own, float* inbox, u64* arrived, int rank) {
  const int group = thread() / 128, odd = lane() % 2;
  const int row = group / 2 * 64 + thread() % 128 / 32 * 16 + lane() / 4 + 8 * odd, to = row / OWN_ROWS;
  const int at = row % OWN_ROWS * PITCH + group % 2 * (TILE / 2) + lane() % 4 / 2 * 4;
  const bool sends = to != rank && to < CLUSTER;
  float* there = sends ? beside(inbox + (rank - to - 1 + CLUSTER) % CLUSTER * INBOX + at, to) : 0;
  u64* bar = sends ? beside(arrived, to) : 0;
#pragma unroll
  for (int j = 0; j < WORDS / 4; j++) {
    float *x = c + 4 * j, a = shuffle_xor(odd ? x[0] : x[2], 1), b = shuffle_xor(odd ? x[1] : x[3], 1);
    float4 y = odd ? float4{a, b, x[2], x[3]} : float4{x[0], x[1], a, b};
    if (to == rank) *(float4*)(own + at + 8 * j) = y;
    else if (sends) send((float4*)(there + 8 * j), y, bar);
  }
}

// Four outputs of one of this block's rows, of all parts in the order of their inputs.
DEVICE float4 total(const float* own, const float* inbox, int rank, int at) {
  float4 sum = {0, 0, 0, 0};
#pragma unroll
  for (int p = 0; p < CLUSTER; p++) {
    float4 x = *(const float4*)((p == rank ? own : inbox + (p - rank - 1 + CLUSTER) % CLUSTER * INBOX) + at);
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  return sum;
}
DEVICE float silu(float x) { return x / (1 + exp2_of(-1.4426950408889634f * x)); }
DEVICE float4 added(float4 x, uint2 y) {
  return float4{x.x + first_of(y.x), x.y + second_of(y.x), x.z + first_of(y.y), x.w + second_of(y.y)};
}
DEVICE float4 floats(uint2 x) { return float4{first_of(x.x), second_of(x.x), first_of(x.y), second_of(x.y)}; }
DEVICE uint2 packed(float4 x) { return uint2{pack(x.x, x.y), pack(x.z, x.w)}; }
DEVICE float4 times(float4 x, float by) { return float4{x.x * by, x.y * by, x.z * by, x.w * by}; }

// As the plain kernels round them.
DEVICE float4 swiglu(float4 gate, float4 up) {
  float4 x = floats(packed(gate)), y = floats(packed(up));
  return float4{silu(x.x) * y.x, silu(x.y) * y.y, silu(x.z) * y.z, silu(x.w) * y.w};
}

// What the rows' results are divided by, the roots of the means of their squares: asked for, and added up later.
struct Squares {
  uint2 sums[SQUARES / 2];

  METHOD void ask(const float* squares) {
    if (!NORM || thread() >= COUNT) return;
#pragma unroll
    for (int i = 0; i < SQUARES / 2; i++) sums[i] = load_now((const uint2*)(squares + thread() * SQUARES) + i);
  }
  METHOD void keep(float* scales) {
    if (!NORM || thread() >= COUNT) return;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < SQUARES / 2; i++) sum += bits_float(sums[i].x) + bits_float(sums[i].y);
    scales[thread()] = rsqrt_of(sum * (1.f / IN) + (float)(EPS));
  }
};

struct Outs {
  u16 *out, *scaled;
  float* squares;
};

// The residual stream's new value, times the weights of the norm that comes next, and its squares.
DEVICE void keep_residual(float4 x, bool valid, int row, int feature, const u16* norm, const Outs& outs) {
  u16* at = outs.out + (u64)row * OUT + feature;
  float square = 0;
  if (valid) {
    uint2 now = packed(added(x, load_now((const uint2*)at)));
    float4 y = floats(now), by = floats(*(const uint2*)(norm + feature));
    *(uint2*)at = now;
    *(uint2*)(outs.scaled + (u64)row * OUT + feature) = packed(float4{y.x * by.x, y.y * by.y, y.z * by.z, y.w * by.w});
    square = (y.x * y.x + y.y * y.y) + (y.z * y.z + y.w * y.w);
  }
#pragma unroll
  for (int mask = 1; mask < GROUP / 4; mask <<= 1) square += shuffle_xor(square, mask);
  if (valid && feature % GROUP == 0) outs.squares[row * (OUT / GROUP) + feature / GROUP] = square;
}

DEVICE void finish(
    const float* own, const float* inbox, const float* scales, int rank, int tile, const u16* bias, const u16* norm,
    const Outs& outs) {
  constexpr int COLUMNS = (GATED ? TILE / 2 : TILE) / 4, ALL = OWN_ROWS * COLUMNS;
  static_assert(ALL % 32 == 0, "a warp's lanes all have something to add up");
#pragma unroll 1
  for (int e = thread(); e < ALL; e += THREADS) {
    const int i = e / COLUMNS, row = rank * OWN_ROWS + i, column = e % COLUMNS * 4;
    const int feature = tile * COLUMNS * 4 + column;
    const bool valid = row < COUNT;
    const float scale = NORM && valid ? scales[row] : 1;
    float4 x = times(total(own, inbox, rank, i * PITCH + column), scale);
    if (GATED) x = swiglu(x, times(total(own, inbox, rank, i * PITCH + TILE / 2 + column), scale));
    if (BIAS) x = added(x, *(const uint2*)(bias + feature));
    if (RESIDUAL) keep_residual(x, valid, row, feature, norm, outs);
    else if (valid) *(uint2*)(outs.out + (u64)row * WIDE + feature) = packed(x);
  }
}

CLUSTER_KERNEL(product, THREADS, 1, CLUSTER)(
    const u16* x, const u16* weight, const float* squares, const u16* bias, const u16* norm, u16* out, u16* scaled,
    float* out_squares) {
  SHARED(memory);
  u8* rows = memory + STAGES * W_BYTES;
  float *own = (float*)rows, *inbox = (float*)(memory + INBOX_AT);
  u64* arrived = (u64*)(rows + CHUNKS * X_BYTES);
  float* scales = (float*)(arrived + 2);
  const int rank = block_x() % CLUSTER;
  const Operands o = {memory, rows, weight, block_x() / CLUSTER, rank * SLICE};
  let_next_begin();
  if (thread() == 0) {
    bar_init(arrived, 1);
    bars_ready();
    if (CLUSTER > 1) bar_expect(arrived, (CLUSTER - 1) * OWN_ROWS * TILE * 4);
  }
#pragma unroll
  for (int chunk = 0; chunk < STAGES; chunk++) copy_weights(o.ring, weight, o.tile, o.first, chunk);
  await_previous();
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; chunk++) {
    copy_rows(rows, x, o.first, chunk);
    if (AGAIN || chunk >= CHUNKS - 2) copies_commit();
  }
  Squares sums;
  sums.ask(squares);
  float c[WORDS] = {};
  if constexpr (AGAIN) multiply<0>(c, o);
  else multiply_all(c, o);
  sums.keep(scales);
  products_wait();
  sync_block();
  if (CLUSTER > 1) cluster_wait();
  hand_over(c, own, inbox, arrived, rank);
  sync_block();
  if (CLUSTER > 1) bar_wait(arrived, 0);
  finish(own, inbox, scales, rank, o.tile, bias, norm, {out, scaled, out_squares});
}
