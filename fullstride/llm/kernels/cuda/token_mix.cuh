// The part of a step between the projections: which block attends to what, and how the parts of a context come together.

// What a block attends to: the same in all layers, but for `pool`, which is the layer's keys and then values.
struct Part {
  int row, kv_head, split, splits, length;
  u64 slot;  // of the new token
  const int* table;
};
struct Contexts {
  const int *positions, *slots, *tables;
  int width;  // of a table

  METHOD Part part(int unit) const {
    Part p;
    p.kv_head = unit % KV_HEADS, p.row = unit / KV_HEADS % ROWS, p.split = unit / (KV_HEADS * ROWS);
    p.length = positions[p.row], p.slot = slots[p.row], p.table = tables + p.row * width;
    p.splits = larger(1, smaller(SPLITS, (p.length + SPAN - 1) / SPAN));
    return p;
  }
};

DEVICE float2 floats(uint2 words) { return float2{bits_float(words.x), bits_float(words.y)}; }

// Largest score, total and two elements of a head, of parts of a context.
struct Sum {
  float largest, total, x, y;

  METHOD void add(float2 part, float2 pair) {
    float top = max_of(largest, part.x), base = top == NOTHING ? 0 : top;
    float old = exp2_of(largest - base), fresh = exp2_of(part.x - base);
    total = total * old + part.y * fresh;
    x = x * old + pair.x * fresh, y = y * old + pair.y * fresh;
    largest = top;
  }
};

// Elements 2 pair and 2 pair + 1 of a head over the warps' parts.
DEVICE Sum sum_of_warps(const float* mix, int head, int pair) {
  float2 parts[WARPS];
  Sum sum = {NOTHING, 0, 0, 0};
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    const float* own = mix + (w * GROUP + head) * MIX_WORDS;
    parts[w] = float2{own[0], own[1]};
    sum.largest = max_of(sum.largest, parts[w].x);
  }
  float base = sum.largest == NOTHING ? 0 : sum.largest;
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    const float* own = mix + (w * GROUP + head) * MIX_WORDS;
    float share = exp2_of(parts[w].x - base);
    sum.total += parts[w].y * share;
    sum.x += own[place_of(2 * pair)] * share, sum.y += own[place_of(2 * pair + 1)] * share;
  }
  return sum;
}

// Add up the warps' parts, and where a context has several blocks theirs, in order; `parts` are of one row and KV head.
DEVICE void bring_together(Block& b, const Part& p, Sets mixed, Sets parts) {
  for (int e = thread(); e < GROUP * HEAD_DIM / 2; e += CONSUMERS) {
    int g = e / (HEAD_DIM / 2), pair = e % (HEAD_DIM / 2);
    Sum sum = sum_of_warps(b.mix, g, pair);
    if (p.split > 0) {
      int at = (p.split * GROUP + g) * PART_WORDS;
      parts.put(at + 2 + 2 * pair, float_bits(sum.x), float_bits(sum.y));
      if (pair == 0) parts.put(at, float_bits(sum.largest), float_bits(sum.total));
      continue;
    }
#pragma unroll 1
    for (int first = 1; first < p.splits; first += TOGETHER) {
      uint2 found[2 * TOGETHER];
      await(found, true, [=](int i) {
        int s = smaller(first + i / 2, p.splits - 1);
        return (const uint2*)(parts.now + (s * GROUP + g) * PART_WORDS) + i % 2 * (1 + pair);
      });
#pragma unroll
      for (int i = 0; i < TOGETHER; i++)
        if (first + i < p.splits) sum.add(floats(found[2 * i]), floats(found[2 * i + 1]));
    }
    float share = 1 / sum.total;
    mixed.put(word_of(p.row, (p.kv_head * GROUP + g) * HEAD_DIM + 2 * pair), pack(sum.x * share, sum.y * share));
  }
}

// Queries of the group, the new key and the new value as bf16 in shared memory, a warp for each: the first two after norm
// and angle. Key and value go into the pool as well, from the block that has the end of the context.
DEVICE void prepare_heads(Block& b, const Part& p, u16* pool, const u32* qkv) {
  constexpr int lanes = HEAD_DIM / 4;  // each has two elements of both halves of a head
  for (int h = b.warp; h < GROUP + 2; h += WARPS) {
    int head = h < GROUP ? p.kv_head * GROUP + h : HEADS + (h - GROUP) * KV_HEADS + p.kv_head;
    const uint2* from = (const uint2*)(qkv + head * HEAD_DIM) + lane();
    uint2 raw[2];
    await(raw, lane() < lanes, [=](int i) { return from + i * lanes; });
    float2 low = floats(raw[0]), high = floats(raw[1]);
    if (h <= GROUP) turn(low, high, b.angles + p.row * HEAD_DIM, b.norms + (h < GROUP ? 0 : HEAD_DIM));
    if (lane() >= lanes) continue;
    u32 words[2] = {pack(low.x, low.y), pack(high.x, high.y)};
    u32* mine = b.heads + h * (HEAD_DIM / 2) + lane();
    mine[0] = words[0], mine[lanes] = words[1];
    if (h >= GROUP && p.split == p.splits - 1) {
      u64 slot = p.slot + (u64)(h - GROUP) * SLOTS;
      u32* kept = (u32*)(pool + (slot * KV_HEADS + p.kv_head) * HEAD_DIM) + lane();
      kept[0] = words[0], kept[lanes] = words[1];
    }
  }
  sync_some(1, CONSUMERS);
}

// What is read of the context does not wait for the new query. Everything is here once, as a layer's instructions are
// fetched anew in every layer.
DEVICE void attend_part(Block& b, const Part& p, u16* pool, const u32* qkv) {
  int tiles = (p.length + TILE - 1) / TILE, next = tiles * p.split / p.splits + b.warp;
  int last = tiles * (p.split + 1) / p.splits, count = -1;
  u32 q[4 * PIECES];
  Tile tile;
  Running run = {NOTHING, 0, {}};
#pragma unroll 1
  while (true) {
    Tile after;
    bool more = next < last;
    if (more) ask(after, pool, p.table, p.kv_head, next * TILE, p.length);
    if (count < 0) {
      prepare_heads(b, p, pool, qkv);
      read_queries(q, b.heads);
      // The last warp is the one with the fewest tiles.
      count = p.split == p.splits - 1 && b.warp == WARPS - 1;
      if (count) read_newest(tile, b.heads + GROUP * (HEAD_DIM / 2));
    }
    if (count) take(run, q, tile, count);
    if (!more) break;
    tile = after, count = p.length - next * TILE, next += WARPS;
  }
  put(run, b.mix + b.warp * GROUP * MIX_WORDS);
}

// By warps that have nothing else to do: keys and values of each warp's first tile to the L2, a layer ahead, as in the
// memory's queue they would wait behind all the weights that the ring has asked for.
DEVICE void fetch_ahead(const Block& b, const Part& p, const u16* pool) {
  if (p.split >= p.splits) return;
  int tiles = (p.length + TILE - 1) / TILE, first = tiles * p.split / p.splits;
  int start = first * TILE, count = smaller(p.length, smaller(tiles * (p.split + 1) / p.splits, first + WARPS) * TILE) - start;
#pragma unroll 1
  for (int layer = 0; layer < LAYERS; layer++) {
    while (watch(b.layer) < layer - 1) rest();
    const u16* keys = pool + (u64)layer * 2 * SLOTS * KV_HEADS * HEAD_DIM;
#pragma unroll 1
    for (int i = thread() - CONSUMERS - 32; i < 2 * count; i += THREADS - CONSUMERS - 32) {
      int token = start + i / 2;
      u64 slot = slot_of(p.table, token) + (i % 2 ? (u64)SLOTS : 0);
      prefetch(keys + (slot * KV_HEADS + p.kv_head) * HEAD_DIM, 2 * HEAD_DIM);
    }
  }
}

// One of this block's parts.
DEVICE void attend_one(Block& b, const Part& p, u16* pool, Sets qkv, Sets mixed, Sets parts) {
  Sets own = parts.from((p.row * KV_HEADS + p.kv_head) * SPLITS * GROUP * PART_WORDS);
  // How many parts there are changes from token to token.
  if (p.split > 0)
    for (int i = thread(); i < GROUP * PART_WORDS; i += CONSUMERS)
      store_now(own.other + p.split * GROUP * PART_WORDS + i, NOT_YET);
  if (p.split >= p.splits) return;
  if (p.length < 0) {
    for (int e = thread(); e < GROUP * HEAD_DIM / 2; e += CONSUMERS)
      mixed.put(word_of(p.row, p.kv_head * GROUP * HEAD_DIM + 2 * e), 0);
    return;
  }
  attend_part(b, p, pool, qkv.now + p.row * QKV);
  sync_some(1, CONSUMERS);
  bring_together(b, p, mixed, own);
}

#define PARTS (ROWS * KV_HEADS * SPLITS)

// All of this block's parts: of each row and KV head one, or more where the context is long and blocks are left.
DEVICE void attend(Block& b, const Contexts& contexts, const Part& first, u16* pool, Sets qkv, Sets mixed, Sets parts) {
  Part part = first;
  for (int unit = block_x_now(); unit < PARTS;) {
    attend_one(b, part, pool, qkv, mixed, parts);
    unit += GRID;
    if (unit < PARTS) {
      sync_some(1, CONSUMERS);
      part = contexts.part(unit);
    }
  }
}
