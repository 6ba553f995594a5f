// All weights as one stream through a ring in shared memory: one thread asks the copy engine for them in the order in
// which the warps need them, as far ahead as the ring is long, whatever the warps wait for meanwhile.

struct Ring {
  u8* slots;
  u64* full;
  u64* empty;
  int slot;
  // Bytes a cycle that are asked for, 0 for as many as there is room for, and when the last ones were: behind a burst, what
  // blocks tell each other would wait.
  u32 parity, pace, last;

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
    int at = slot + lane();
    if (lane() < count) bar_arrive(empty + (at >= RING ? at - RING : at));
    next(count);
  }
  METHOD void fill(const u8* from, u32 bytes) {
    bar_wait(empty + slot, parity ^ 1);
    while (pace && cycles() - last < bytes / pace) rest();
    last = cycles();
    bar_expect(full + slot, bytes);
    bulk_copy(slots + slot * SLOT, from, bytes, full + slot);
    next();
  }
};

// This block's units of a matrix: group by group, chunk by chunk.
template <class M> DEVICE void fill_units(Ring& ring, const u8* weights) {
  for (int first = 0; first < M::mine; first += M::group)
    for (int chunk = 0; chunk < M::chunks; chunk++)
      for (int i = first; i < smaller(first + M::group, M::mine); i++) {
        int unit = block_x_now() + i * GRID;
        if (unit < M::units) ring.fill(weights + ((u64)unit * M::chunks + chunk) * M::bytes, M::bytes);
      }
}
template <class M> DEVICE const u8* layer_of(const u8* weights, int layer) {
  return weights + (u64)layer * M::units * M::chunks * M::bytes;
}

DEVICE void fill_all(Ring& ring, const u8* qkv, const u8* output, const u8* gate_up, const u8* down, const u8* head) {
  ring.pace = PACE;
  for (int layer = 0; layer < LAYERS; layer++) {
    fill_units<Qkv>(ring, layer_of<Qkv>(qkv, layer));
    fill_units<Output>(ring, layer_of<Output>(output, layer));
    fill_units<GateUp>(ring, layer_of<GateUp>(gate_up, layer));
    fill_units<Down>(ring, layer_of<Down>(down, layer));
  }
  ring.pace = 0;
  fill_units<Head>(ring, head);
}
