// Of the tokens from FIRST on: queries normalised and rotated, keys and values into the pool; a warp a head.

KERNEL(chunk_heads, WARPS * 32, 1)(
    const u16* qkv, const u16* pool, const int* layer, const int* positions, const int* slots, const float* cos,
    const float* sin, const u16* q_norm, const u16* k_norm, u16* queries, u16* written) {
  const int chunk_token = block_y(), token = FIRST + chunk_token, head = block_x() * WARPS + thread() / 32;
  if (positions[token] < 0 || head >= HEADS + 2 * KV_HEADS) return;
  const u16* from = qkv + (u64)token * WIDE + head * HEAD_DIM;
  u16* row = written + ((u64)layer[0] * 2 * SLOTS + slots[token]) * ROW;
  if (head < HEADS + KV_HEADS) {
    bool query = head < HEADS;
    Head x = head_at(from), angle = angles(cos + (u64)token * HALF, sin + (u64)token * HALF);
    if (NORMS) x = normalised(x, head_at(query ? q_norm : k_norm));
    return rotated(x, angle, query ? queries + ((u64)chunk_token * HEADS + head) * HEAD_DIM : row + (head - HEADS) * HEAD_DIM);
  }
  u32* to = (u32*)(row + (u64)SLOTS * ROW + (head - HEADS - KV_HEADS) * HEAD_DIM);
  for (int i = lane(); i < HALF; i += 32) to[i] = ((const u32*)from)[i];
}
