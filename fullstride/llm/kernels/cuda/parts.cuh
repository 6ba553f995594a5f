// Parts of a row's attention: the context of a row is divided by its length alone, so that neither the batch nor the table's
// width changes what is added in which order.

// Tokens of a tile; tiles that a warp gets before another block is worth it are LEAST.
constexpr int TILE = 16;

// The first token that the one at position n sees.
DEVICE int first_seen(int n) { return WINDOW ? larger(0, n - WINDOW + 1) : 0; }
// Blocks that have tiles of what the token at position n sees, of PARTS.
DEVICE int ranks_of(int n) {
  const int tiles = (n + TILE - 1) / TILE - first_seen(n) / TILE;
  return larger(1, smaller(PARTS, (tiles + WARPS * LEAST - 1) / (WARPS * LEAST)));
}
// Two elements of a head's result, in shares of exp2(peak).
struct alignas(16) Pair {
  float x, y, peak, total;
};
// Where a block's part of a row and key head begins among all parts.
DEVICE u64 part_of(int row, int kv, int rank) { return (((u64)row * KV_HEADS + kv) * PARTS + rank) * GROUP * HALF; }
// Of `count` parts at most COUNT, in their order.
template <int COUNT, class Part> DEVICE Pair sum_of(int count, Part part) {
  Pair each[COUNT], all = {0, 0, -1e30f, 0};
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    each[i] = {0, 0, -1e30f, 0};
    if (i < count) each[i] = part(i);
    all.peak = max_of(all.peak, each[i].peak);
  }
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    float share = exp2_of(each[i].peak - all.peak);
    all.total += share * each[i].total, all.x += share * each[i].x, all.y += share * each[i].y;
  }
  return all;
}
