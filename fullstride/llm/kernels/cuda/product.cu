// out = x W^T of up to 128 rows, at the speed at which W is read: with or without a norm before it, a bias, the residual stream
// or SwiGLU after it. A block has TILE outputs and a SLICE of the inputs, so that it reads little of x; the blocks of a cluster
// have the same outputs, and each adds up their parts for some of the rows, in order. In a chain the weights are
// under way, or there, before x is.
//
// Rows that a product reads stand in global memory as the tensor cores want them in shared memory (`place_of`), so that a
// chunk of them is one copy. A norm is two things: its weights are multiplied into x by whoever writes x, and the
// rows' sums of squares, of 64 inputs each, say what the results are divided by.

constexpr int SLICE = IN / CLUSTER, CHUNKS = SLICE / CHUNK;
// Four warps have 64 rows and half of the outputs.
constexpr int THREADS = 256 * SLABS, WORDS = TILE / 4;
constexpr int W_BYTES = TILE * 128, X_BYTES = SLABS * 64 * 128;  // of a chunk
// In floats; rows of parts begin in different banks.
constexpr int PITCH = TILE + 8, OWN_ROWS = ROWS / CLUSTER, INBOX = OWN_ROWS * PITCH;
constexpr int WIDE = GATED ? OUT / 2 : OUT, GROUP = 64, SQUARES = IN / GROUP;  // outputs of a sum of squares

// Of the tile: gates and then as many ups, or outputs one after the other.
DEVICE int weight_row(int tile, int i) {
  if (!GATED) return tile * TILE + i;
  return (i < TILE / 2 ? 0 : OUT / 2 - TILE / 2) + tile * (TILE / 2) + i;
}
DEVICE void copy_weights(u8* to, const u16* weight, int tile, int first) {
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; chunk++)
#pragma unroll
    for (int i = thread(); i < TILE * 8; i += THREADS) {
      int row = i / 8, piece = i % 8;
      copy16(to + chunk * W_BYTES + place_in_chunk(row, piece), weight + (u64)weight_row(tile, row) * IN + first + chunk * CHUNK + piece * 8, true);
    }
  copies_commit();
}
// What stands behind the last row comes to nothing that is kept.
DEVICE void copy_rows(u8* to, const u16* x, int first, u64* there) {
  constexpr u32 BYTES = (COUNT + 7) / 8 * 8 * 128;
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; chunk++) {
    bar_expect(there + chunk, BYTES);
    bulk_copy_kept(to + chunk * X_BYTES, (const u8*)x + (u64)(first / CHUNK + chunk) * X_BYTES, BYTES, there + chunk);
  }
}

// The chunks' products as their rows come.
DEVICE void multiply(float (&c)[WORDS], const u8* w, const u8* rows, u64* there) {
  const int group = thread() / 128;
  w += group % 2 * (TILE / 2) * 128, rows += group / 2 * 64 * 128;
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; chunk++) {
    bar_wait(there + chunk, 0);
    products_begin();
#pragma unroll
    for (int step = 0; step < CHUNK / 16; step++) product_64(c, rows + chunk * X_BYTES, w + chunk * W_BYTES, step);
    products_commit();
  }
  products_wait();
}

DEVICE void keep(float* parts, const float (&c)[WORDS]) {
  const int group = thread() / 128, row = group / 2 * 64 + thread() % 128 / 32 * 16 + lane() / 4;
  float* to = parts + row * PITCH + group % 2 * (TILE / 2) + lane() % 4 * 2;
#pragma unroll
  for (int high = 0; high < 2; high++)
    if (row + 8 * high < ROWS)
#pragma unroll
      for (int j = 0; j < WORDS / 4; j++) *(float2*)(to + high * 8 * PITCH + 8 * j) = float2{c[4 * j + 2 * high], c[4 * j + 2 * high + 1]};
}

// Every block's part of the rows that another block adds up goes there, a warp for each.
DEVICE void exchange(float* parts, float* inbox, u64* arrived, int rank) {
  const int to = (rank + 1 + thread() / 32) % CLUSTER, slot = (rank - to - 1 + CLUSTER) % CLUSTER;
  if (lane() || thread() / 32 >= CLUSTER - 1) return;
  push(beside(inbox + slot * INBOX, to), parts + to * INBOX, INBOX * 4, beside(arrived, to));
}

// Four outputs of one of this block's rows, of all parts in the order of their inputs.
DEVICE float4 total(const float* parts, const float* inbox, int rank, int at) {
  float4 sum = {0, 0, 0, 0};
#pragma unroll
  for (int p = 0; p < CLUSTER; p++) {
    float4 x = *(const float4*)((p == rank ? parts + rank * INBOX : inbox + (p - rank - 1 + CLUSTER) % CLUSTER * INBOX) + at);
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  return sum;
}
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
  float sums[SQUARES];

  METHOD void ask(const float* squares) {
    if (!NORM || thread() >= COUNT) return;
#pragma unroll
    for (int i = 0; i < SQUARES; i++) sums[i] = bits_float(load_now((const u32*)squares + thread() * SQUARES + i));
  }
  METHOD void keep(float* scales) {
    if (!NORM || thread() >= COUNT) return;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < SQUARES; i++) sum += sums[i];
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
    *(uint2*)(outs.scaled + place_of(row, feature)) = packed(float4{y.x * by.x, y.y * by.y, y.z * by.z, y.w * by.w});
    square = (y.x * y.x + y.y * y.y) + (y.z * y.z + y.w * y.w);
  }
#pragma unroll
  for (int mask = 1; mask < GROUP / 4; mask <<= 1) square += shuffle_xor(square, mask);
  if (valid && feature % GROUP == 0) outs.squares[row * (OUT / GROUP) + feature / GROUP] = square;
}

DEVICE void finish(
    const float* parts, const float* inbox, const float* scales, int rank, int tile, const u16* bias, const u16* norm,
    const Outs& outs) {
  constexpr int COLUMNS = (GATED ? TILE / 2 : TILE) / 4, ALL = OWN_ROWS * COLUMNS;
  static_assert(!RESIDUAL || ALL % 32 == 0, "a warp's lanes add up their squares together");
#pragma unroll 1
  for (int e = thread(); e < ALL; e += THREADS) {
    const int i = e / COLUMNS, row = rank * OWN_ROWS + i, column = e % COLUMNS * 4;
    const int feature = tile * COLUMNS * 4 + column;
    const bool valid = row < COUNT;
    const float scale = NORM && valid ? scales[row] : 1;
    float4 x = times(total(parts, inbox, rank, i * PITCH + column), scale);
    if (GATED) x = swiglu(x, times(total(parts, inbox, rank, i * PITCH + TILE / 2 + column), scale));
    if (BIAS) x = added(x, *(const uint2*)(bias + feature));
    if (RESIDUAL) keep_residual(x, valid, row, feature, norm, outs);
    else if (valid) *(uint2*)(outs.out + (GATED ? place_of(row, feature) : (u64)row * WIDE + feature)) = packed(x);
  }
}

CLUSTER_KERNEL(product, THREADS, 1, CLUSTER)(
    const u16* x, const u16* weight, const float* squares, const u16* bias, const u16* norm, u16* out, u16* scaled,
    float* out_squares) {
  SHARED(memory);
  u8* rows = memory + CHUNKS * W_BYTES;
  float *parts = (float*)memory, *inbox = parts + ROWS * PITCH;
  u64 *there = (u64*)(memory + AFTER), *arrived = there + CHUNKS;
  float* scales = (float*)(arrived + 1 + (CHUNKS + 1) % 2);
  const int rank = block_x() % CLUSTER, tile = block_x() / CLUSTER, first = rank * SLICE;
  let_next_begin();
  if (thread() == 0) {
#pragma unroll
    for (int i = 0; i <= CHUNKS; i++) bar_init(there + i, 1);
    bars_ready();
    if (CLUSTER > 1) bar_expect(arrived, (CLUSTER - 1) * INBOX * 4);
  }
  copy_weights(memory, weight, tile, first);
  await_previous();
  if (thread() == 0) copy_rows(rows, x, first, there);
  Squares sums;
  sums.ask(squares);
  copies_wait<0>();
  shared_ready();
  sync_block();
  float c[WORDS] = {};
  multiply(c, memory, rows, there);
  sums.keep(scales);
  // All products of this block are done; those of the others are once they have come here, too.
  sync_block();
  if (CLUSTER > 1) cluster_arrive();
  keep(parts, c);
  shared_ready();
  if (CLUSTER > 1) cluster_wait();
  sync_block();
  if (CLUSTER > 1) {
    exchange(parts, inbox, arrived, rank);
    bar_wait(arrived, 0);
  }
  finish(parts, inbox, scales, rank, tile, bias, norm, {out, scaled, out_squares});
  // Nobody ends while something of it is on its way.
  if (CLUSTER > 1) cluster_arrive_only(), cluster_wait();
}
