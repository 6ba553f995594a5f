// The logits of the next token of up to 16 rows, in one launch that stays on the GPU from the embedding to the head.

// Add `x` to this block's part of the residual stream, which it keeps in fp32, and tell the others.
DEVICE void add_residual(Block& b, Sets to, int i, int row, int quarter, float4 x) {
  float4* mine = (float4*)(b.residual + (i * ROWS + row) * UNIT + 4 * quarter);
  float4 sum = *mine;
  sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  *mine = sum;
  int feature = (block_x_now() + i * GRID) * UNIT + 4 * quarter;
  to.put(word_of(row, feature), pack(sum.x, sum.y));
  to.put(word_of(row, feature + 2), pack(sum.z, sum.w));
}

DEVICE void put_qkv(Sets to, const float* bias, int i, int row, int quarter, float4 x) {
  int feature = (block_x_now() + i * GRID) * UNIT + 4 * quarter;
#if QKV_BIAS
  x.x += bias[feature], x.y += bias[feature + 1], x.z += bias[feature + 2], x.w += bias[feature + 3];
#endif
  to.put(row * QKV + feature, float_bits(x.x), float_bits(x.y));
  to.put(row * QKV + feature + 2, float_bits(x.z), float_bits(x.w));
}

// The first layer's rows come from the table of embeddings, which nobody has to be awaited for.
DEVICE void first_qkv(Block& b, const u32* embed, const int* tokens, const float* bias, Sets to) {
  constexpr int N = Qkv::group, S = N == 1 ? 4 : 2;
  for (int unit = 0; unit < Qkv::mine; unit += N) {
    float c[N][S][4] = {}, squares[2] = {};
    int n = b.count<Qkv>(unit, N);
    for (int chunk = 0; chunk < Qkv::chunks; chunk++) {
      Rows<Qkv> rows;
      rows.look_up(embed, tokens, chunk, b.warp);
      rows.square(squares);
      add_next<Qkv, N, S>(b, rows, c, n);
    }
    finish<Qkv, N, S, true>(b, c, squares, n,
                            [=](int i, int row, int q, float4 x) { put_qkv(to, bias, unit + i, row, q, x); });
  }
}

DEVICE void first_residual(Block& b, const u32* embed, const int* tokens) {
  int n = b.count<Output>(0, Output::mine);
  for (int e = thread(); e < n * ROWS * UNIT / 2; e += CONSUMERS) {
    int pair = e % (UNIT / 2), row = e / (UNIT / 2) % ROWS, i = e / (ROWS * UNIT / 2);
    u32 word = embed[(u64)tokens[row] * (HIDDEN / 2) + (block_x_now() + i * GRID) * (UNIT / 2) + pair];
    b.residual[2 * e] = first_of(word), b.residual[2 * e + 1] = second_of(word);
  }
}

DEVICE void head(Block& b, const u32* words, float* logits) {
  constexpr int N = Head::group, S = 2;
  Rows<Head> rows[Head::chunks];
  float squares[2] = {};
  read_all(rows, words, 0, b.warp);
#pragma unroll
  for (int i = 0; i < Head::chunks; i++) rows[i].square(squares);
  for (int first = 0; first < Head::mine; first += N) {
    int n = b.count<Head>(first, N);
    if (n == 0) break;
    float c[N][S][4] = {};
#pragma unroll
    for (int i = 0; i < Head::chunks; i++) add_next<Head, N, S>(b, rows[i], c, n);
    finish<Head, N, S, true>(b, c, squares, n, [=](int i, int row, int q, float4 x) {
      *(float4*)(logits + (u64)row * VOCAB + (block_x_now() + (first + i) * GRID) * UNIT + 4 * q) = x;
    });
  }
}

DEVICE Block make_block(u8* shared) {
  u64* bars = (u64*)(shared + RING * SLOT);
  float* floats = (float*)(bars + 2 * RING);
  Block b;
  b.ring = Ring{shared, bars, bars + RING, 0, 0};
  b.sums = floats;
  b.heads = (u32*)(b.sums + 2 * SUMS_FLOATS);
  b.squares = b.sums + 2 * SUMS_FLOATS + HEAD_WORDS;
  b.mix = b.squares + 2 * SQUARES_FLOATS;
  b.angles = b.mix + MIX_FLOATS;
  b.norms = b.angles + ANGLE_FLOATS;
  b.residual = b.norms + NORM_FLOATS;
  b.table = (int*)(b.residual + RESIDUAL_FLOATS), b.layer = b.table + TABLE_WORDS;
  b.turn = 0, b.warp = thread() / 32;
  if (thread() == 0) {
    *b.layer = 0;
    for (int i = 0; i < RING; i++) bar_init(b.ring.full + i, 1), bar_init(b.ring.empty + i, WARPS);
    bars_ready();
  }
  return b;
}

DEVICE bool nobody(const int* positions) {
  int most = -1;
#pragma unroll
  for (int i = 0; i < ROWS; i++) most = larger(most, positions[i]);
  return most < 0;
}

KERNEL(token, THREADS, 1)(
    const int* tokens, const int* positions, const int* slots, const int* tables, const float* cos, const float* sin,
    const u32* embed, const u8* qkv, const u8* output, const u8* gate_up, const u8* down, const u8* head_weights,
    const float* norms, const float* bias, const int* width, const u16*, const u32*, float* logits, u16* pool, u32* scratch) {
  SHARED(shared);
  // Steps after the end of all rows, which nobody has asked the host about.
  if (nobody(positions)) return;
  Block b = make_block(shared);
  for (int i = thread(); i < ROWS * HEAD_DIM / 2; i += THREADS) {
    int row = i / (HEAD_DIM / 2), at = i % (HEAD_DIM / 2);
    b.angles[row * HEAD_DIM + at] = cos[i], b.angles[row * HEAD_DIM + HEAD_DIM / 2 + at] = sin[i];
  }
  Contexts contexts = {positions, slots, tables, *width};
  Part part = {};
  if (block_x_now() < PARTS) {
    part = contexts.part(block_x_now());
    int entries = part.length / BLOCK + 1;
    if (entries <= TABLE_WORDS) {
      for (int i = thread(); i < entries; i += THREADS) b.table[i] = part.table[i];
      part.table = b.table;
    }
  }
  sync_block();
  if (b.warp >= WARPS) {
    fewer_registers<24>();
    if (thread() == CONSUMERS) fill_all(b.ring, qkv, output, gate_up, down, head_weights);
    if (b.warp > WARPS && block_x_now() < PARTS) fetch_ahead(b, part, pool);
  } else {
    more_registers<240>();
  int turn = load_now(scratch) & 1;
  Sets set = {scratch + HEADER_WORDS + turn * SET_WORDS, scratch + HEADER_WORDS + (1 - turn) * SET_WORDS};
  first_residual(b, embed, tokens);
  const u32* before = 0;
  float norm = QK_NORM && thread() < NORM_FLOATS ? norms[thread()] : 0;
  for (int layer = 0; layer < LAYERS; layer++) {
    Sets made = set.from(layer * LAYER_WORDS), mixed = made.from(QKV_WORDS), middle = mixed.from(MIXED_WORDS);
    Sets inner = middle.from(HIDDEN_WORDS), after = inner.from(INNER_WORDS), parts = after.from(HIDDEN_WORDS);
    const float* shift = QKV_BIAS ? bias + layer * QKV : 0;
    if (thread() < NORM_FLOATS) b.norms[thread()] = norm;
    if (thread() == 0) *(volatile int*)b.layer = layer;
    if (layer == 0)
      first_qkv(b, embed, tokens, shift, made);
    else
      product<Qkv, true>(b, before, [=](int i, int row, int q, float4 x) { put_qkv(made, shift, i, row, q, x); });
    attend(b, contexts, part, pool + (u64)layer * 2 * SLOTS * KV_HEADS * HEAD_DIM, made, mixed, parts);
    // Not before: the compiler may let attention wait for it.
    if (QK_NORM && thread() < NORM_FLOATS && layer + 1 < LAYERS) norm = norms[(layer + 1) * NORM_FLOATS + thread()];
    product<Output, false>(b, mixed.now, [&](int i, int row, int q, float4 x) { add_residual(b, middle, i, row, q, x); });
    product<GateUp, true>(b, middle.now, [=](int i, int row, int q, float4 x) {
      int feature = (block_x_now() + i * GRID) * (UNIT / 2) + 2 * q;
      inner.put(word_of(row, feature), pack(silu(x.x) * x.y, silu(x.z) * x.w));
    });
    product<Down, false>(b, inner.now, [&](int i, int row, int q, float4 x) { add_residual(b, after, i, row, q, x); });
    before = after.now;
  }
  head(b, before, logits);
  if (block_x_now() == 0 && thread() == 0) scratch[0] = turn + 1;
  }
}
