// All weights as one stream through a ring in shared memory: one thread asks the copy engine for them in the order in
// which the warps need them, as far ahead as the ring is long, whatever the warps wait for meanwhile.

struct Ring {
  u8* slots;
  u64* full;
  u64* empty;
  int slot;
  u32 parity;

  METHOD void next(int count = 1) {
    slot += count;
    if (slot >= RING) slot -= RING, parity ^= 1;
  }
  // The slot `ahead` of the next one, as soon as it is filled.
  METHOD const u8* await(int ahead) {
    int at = slot + ahead, turned = at >= RING;
    at -= turned ? RING : 0;
    bar_wait(full + at, parity ^ turned);
    return slots + at * SLOT;
  }
  // The next `count` slots may be filled again, as far as this warp is concerned.
  METHOD void release(int count) {
    sync_lanes();
    if (lane() < count) {
      int at = slot + lane();
      bar_arrive(empty + (at >= RING ? at - RING : at));
    }
    next(count);
  }
  METHOD void fill(const u8* from, u32 bytes) {
    bar_wait(empty + slot, parity ^ 1);
    bar_expect(full + slot, bytes);
    bulk_copy(slots + slot * SLOT, from, bytes, full + slot);
    next();
  }
};

// This block's units of a matrix, in the order in which `multiply` (`token_products.cuh`) takes them.
DEVICE void fill_units(Ring& ring, const Projection& p, const u8* weights) {
#pragma unroll 1
  for (int group = 0; group < p.mine; group += MOST_UNITS)
#pragma unroll 1
    for (int flight = 0; flight < p.chunks; flight += FLIGHT)
#pragma unroll 1
      for (int pair = group; pair < group + p.count(group); pair += TOGETHER)
#pragma unroll 1
        for (int chunk = flight; chunk < smaller(flight + FLIGHT, p.chunks); chunk++)
#pragma unroll 1
          for (int i = pair; i < smaller(pair + TOGETHER, group + p.count(group)); i++)
            ring.fill(weights + ((u64)(block_x() + i * GRID) * p.chunks + chunk) * SLOT, SLOT);
}

DEVICE void fill_all(Ring& ring, const u8* qkv, const u8* output, const u8* gate_up, const u8* down, const u8* head) {
#pragma unroll 1
  for (int step = 0; step <= 4 * LAYERS; step++) {
    Projection p = Projection::of(step < 4 * LAYERS ? step % 4 : HEAD_MATRIX);
    const u8* first = OF(p.matrix, qkv, output, gate_up, down, head);
    u64 before = p.matrix == HEAD_MATRIX ? 0 : step / 4;
    fill_units(ring, p, first + before * p.units * p.chunks * SLOT);
  }
}
