// All weights as one stream through a ring in shared memory: one thread asks the copy engine for them in the order in
// which the warps need them, as far ahead as the ring is long, whatever the warps wait for meanwhile.

struct Ring {
  u8* slots;
  u64* full;
  u64* empty;
  int slot;
  u32 parity;

  METHOD void next() {
    if (++slot == RING) slot = 0, parity ^= 1;
  }
  METHOD void fill(const u8* from, u32 bytes) {
    bar_wait(empty + slot, parity ^ 1);
    bar_expect(full + slot, bytes);
    bulk_copy(slots + slot * SLOT, from, bytes, full + slot);
    next();
  }
};

// Units [first, last) of this block, each every GRID, chunk by chunk.
template <class M> DEVICE void fill_units(Ring& ring, const u8* weights, int first, int last) {
  for (int chunk = 0; chunk < M::chunks; chunk++)
    for (int i = first; i < last; i++) {
      int unit = block_x() + i * GRID;
      if (unit < M::units) ring.fill(weights + ((u64)unit * M::chunks + chunk) * M::bytes, M::bytes);
    }
}
template <class M> DEVICE const u8* layer_of(const u8* weights, int layer) {
  return weights + (u64)layer * M::units * M::chunks * M::bytes;
}

DEVICE void fill_all(Ring& ring, const u8* qkv, const u8* output, const u8* gate_up, const u8* down, const u8* head) {
  for (int layer = 0; layer < LAYERS; layer++) {
    fill_units<Qkv>(ring, layer_of<Qkv>(qkv, layer), 0, Qkv::mine);
    fill_units<Output>(ring, layer_of<Output>(output, layer), 0, Output::mine);
    fill_units<GateUp>(ring, layer_of<GateUp>(gate_up, layer), 0, GateUp::mine);
    fill_units<Down>(ring, layer_of<Down>(down, layer), 0, Down::mine);
  }
  for (int i = 0; i < Head::mine; i += HEAD_UNITS) fill_units<Head>(ring, head, i, smaller(i + HEAD_UNITS, Head::mine));
}
