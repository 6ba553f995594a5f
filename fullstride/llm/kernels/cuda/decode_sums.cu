// Attention of one token a row from the parts that `decode_attention.cu` left; a block has a row's queries of one key head.

KERNEL(decode_sums, WARPS * 32, 1)(const int* positions, const float* parts, u16* out) {
  const int kv = block_x(), row = block_y(), n = positions[row], ranks = ranks_of(n);
  const Pair* from = (const Pair*)parts;
  u32* to = (u32*)(out + ((u64)row * HEADS + kv * GROUP) * HEAD_DIM);
#pragma unroll 1
  for (int i = thread(); i < GROUP * HALF; i += WARPS * 32) {
    if (n < 0) {
      to[i] = 0;
      continue;
    }
    const Pair all = sum_of<PARTS>(ranks, [&](int r) { return from[part_of(row, kv, r) + i]; });
    to[i] = pack(all.x / all.total, all.y / all.total);
  }
}
