// Rows that a product reads, in the order in which it wants them in shared memory: chunks of 64 features, in each of
// them all rows, 64 times SLABS, of 128 bytes, 16-byte pieces of which stand at piece ^ row % 8.

constexpr int CHUNK = 64;

// Where 16 bytes of a chunk's row are, in bytes.
DEVICE int place_in_chunk(int row, int piece) { return row * 128 + (piece ^ row % 8) * 16; }
// Of an element among all chunks', in elements.
DEVICE int place_of(int row, int feature) {
  return feature / CHUNK * SLABS * 64 * CHUNK + place_in_chunk(row, feature / 8 % 8) / 2 + feature % 8;
}
