// Of the tokens from FIRST on: queries normalised and rotated, keys and values into the pool; a warp a head.

KERNEL(chunk_heads, WARPS * 32, 1)(
    const u16* qkv, const Kept* pool, const int* layer, const int* positions, const int* slots, const float* cos,
    const float* sin, const u16* q_norm, const u16* k_norm, u16* queries, Kept* written) {
  const int chunk_token = block_y(), token = FIRST + chunk_token, head = block_x() * WARPS + thread() / 32;
  if (positions[token] < 0 || head >= HEADS + 2 * KV_HEADS) return;
  const u16* from = qkv + (u64)token * WIDE + head * HEAD_DIM;
  Kept* keys = written + (u64)layer[0] * 2 * SLOTS * ROW;
  const int kv = (head - HEADS) % KV_HEADS;
  Head x = head_at(from);
  if (head >= HEADS + KV_HEADS) return store_kept(x, keys + (u64)SLOTS * ROW + kv * HEAD_DIM, kv, slots[token]);
  if (NORMS) x = normalised(x, head_at(head < HEADS ? q_norm : k_norm));
  x = rotated(x, angles(cos + (u64)token * HALF, sin + (u64)token * HALF));
  if (head < HEADS) return store_head(x, queries + ((u64)chunk_token * HEADS + head) * HEAD_DIM);
  store_kept(x, keys + kv * HEAD_DIM, kv, slots[token]);
}
