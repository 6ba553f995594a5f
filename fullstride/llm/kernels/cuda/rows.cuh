// Rows that a product reads, in the order in which it wants them in shared memory: chunks of 64 features, in each of
// them all rows, 64 times SLABS, of 128 bytes, 16-byte pieces of which stand at piece ^ row % 8.

constexpr int CHUNK = 64;

// Of an element, in elements.
DEVICE int place_of(int row, int feature) {
  return (feature / CHUNK * SLABS * 64 + row) * CHUNK + ((feature / 8 % 8) ^ row % 8) * 8 + feature % 8;
}
