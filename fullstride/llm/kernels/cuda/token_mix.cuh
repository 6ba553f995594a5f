// The part of a step between the projections: which block attends to what, and how the parts of a context come together.

struct Attended {
  const int *positions, *slots, *tables;
  int width;  // of a table
  u16* pool;  // of this layer: keys, then values
};

// Largest score, total and two elements of a head, of parts of a context.
struct Sum {
  float largest, total, x, y;

  METHOD void add(float2 part, float2 pair) {
    float top = max_of(largest, part.x), base = top == -bits_float(0x7f800000) ? 0 : top;
    float old = exp2_of(largest - base), fresh = exp2_of(part.x - base);
    total = total * old + part.y * fresh;
    x = x * old + pair.x * fresh, y = y * old + pair.y * fresh;
    largest = top;
  }
};

DEVICE float2 floats(uint2 words) { return float2{bits_float(words.x), bits_float(words.y)}; }

// Add up the warps' parts, and where a context has several blocks theirs, in order; `parts` are of one row and KV head.
DEVICE void bring_together(Block& b, int row, int kv_head, int split, int splits, Sets mixed, Sets parts) {
  for (int e = thread(); e < GROUP * HEAD_DIM / 2; e += CONSUMERS) {
    int g = e / (HEAD_DIM / 2), pair = e % (HEAD_DIM / 2);
    Sum sum = {-bits_float(0x7f800000), 0, 0, 0};
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float2* own = (const float2*)(b.mix + (w * GROUP + g) * PART_WORDS);
      sum.add(own[0], own[1 + pair]);
    }
    if (split > 0) {
      int at = (split * GROUP + g) * PART_WORDS;
      parts.put(at + 2 + 2 * pair, float_bits(sum.x), float_bits(sum.y));
      if (pair == 0) parts.put(at, float_bits(sum.largest), float_bits(sum.total));
      continue;
    }
    for (int s = 1; s < splits; s++) {
      const uint2* part = (const uint2*)(parts.now + (s * GROUP + g) * PART_WORDS);
      uint2 found[2];
      await(found, [=](int i) { return part + i * (1 + pair); });
      sum.add(floats(found[0]), floats(found[1]));
    }
    float share = 1 / sum.total;
    mixed.put(word_of(row, (kv_head * GROUP + g) * HEAD_DIM + 2 * pair), pack(sum.x * share, sum.y * share));
  }
}

// A part of the context of one row and KV head; what is read of it does not wait for the new query.
DEVICE void attend_part(Block& b, const Attended& a, const u32* qkv, int row, int kv_head, int split, int splits, float* mix) {
  int length = a.positions[row], tiles = (length + TILE - 1) / TILE;
  int next = tiles * split / splits + b.warp, last = tiles * (split + 1) / splits;
  const int* table = a.tables + row * a.width;
  Tile tile;
  if (next < last) ask(tile, a.pool, table, kv_head, next * TILE, length);
  uint4 raw[2 * PIECES];
  u32 words[4 * PIECES], q[4 * PIECES];
  await_heads(qkv, kv_head, raw);
  turn(raw, b.angles + row * HEAD_DIM, b.norms + (lane() / 4 < GROUP ? 0 : HEAD_DIM), words);
#pragma unroll
  for (int i = 0; i < 4 * PIECES; i++) q[i] = lane() / 4 < GROUP ? words[i] : 0;
  Running run = {-bits_float(0x7f800000), 0, {}};
  while (next < last) {
    Tile after;
    if (next + WARPS < last) ask(after, a.pool, table, kv_head, (next + WARPS) * TILE, length);
    take(run, q, tile, length - next * TILE);
    tile = after;
    next += WARPS;
  }
  if (split == splits - 1 && b.warp == 0) {
    u16* to = a.pool + ((u64)a.slots[row] * KV_HEADS + kv_head) * HEAD_DIM;
    add_new(run, q, words, qkv + (HEADS + KV_HEADS + kv_head) * HEAD_DIM, to, to + (u64)SLOTS * KV_HEADS * HEAD_DIM);
  }
  put(run, mix);
}

// All of this block's parts: of each row and KV head one, or more where the context is long and blocks are left.
DEVICE void attend(Block& b, const Attended& a, Sets qkv, Sets mixed, Sets parts) {
  for (int unit = block_x(); unit < ROWS * KV_HEADS * SPLITS; unit += GRID) {
    int kv_head = unit % KV_HEADS, row = unit / KV_HEADS % ROWS, split = unit / (KV_HEADS * ROWS);
    Sets own = parts.from((row * KV_HEADS + kv_head) * SPLITS * GROUP * PART_WORDS);
    // How many there are changes from token to token.
    if (split > 0)
      for (int i = thread(); i < GROUP * PART_WORDS; i += CONSUMERS)
        store_now(own.other + split * GROUP * PART_WORDS + i, NOT_YET);
    int length = a.positions[row], splits = larger(1, smaller(SPLITS, (length + SPAN - 1) / SPAN));
    if (split >= splits) continue;
    if (length < 0) {
      for (int e = thread(); e < GROUP * HEAD_DIM / 2; e += CONSUMERS)
        mixed.put(word_of(row, kv_head * GROUP * HEAD_DIM + 2 * e), 0);
      continue;
    }
    attend_part(b, a, qkv.now + row * QKV, row, kv_head, split, splits, b.mix + b.warp * GROUP * PART_WORDS);
    sync_some(1, CONSUMERS);
    bring_together(b, row, kv_head, split, splits, mixed, own);
    if (unit + GRID < ROWS * KV_HEADS * SPLITS) sync_some(1, CONSUMERS);
  }
}
