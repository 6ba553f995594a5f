// The sum of what several GPUs have, on all of them: each writes what it has into the others' memory and adds up what came, in
// the order of the GPUs, so that all have the same to the bit. Eight bytes travel with the number of the sum beside each
// half: who reads that number has read the half, and nobody waits for a fence or for a second message.
//
// What came is kept in two places, used in turns. Who writes into one has finished the sum after the one that was read there,
// for which every other GPU had to begin it: all have read.

constexpr int LINES = BYTES / 8, MOST_RANKS = 8;

// Of a turn's lines those of a rank.
DEVICE uint4* lines_of(u8* memory, u32 number, int rank) {
  return (uint4*)memory + ((u64)(number & 1) * RANKS + rank) * MOST_LINES;
}
DEVICE uint2 received(const uint4* line, u32 number) {
  uint4 x = load_far(line);
  while (x.y != number || x.w != number) rest(), x = load_far(line);
  return uint2{x.x, x.z};
}
// As many numbers as eight bytes have.
struct Sum {
  float x[4];

  METHOD void add(uint2 part) {
    if (FP32) x[0] += bits_float(part.x), x[1] += bits_float(part.y);
    else x[0] += first_of(part.x), x[1] += second_of(part.x), x[2] += first_of(part.y), x[3] += second_of(part.y);
  }
  METHOD uint2 bytes() const {
    return FP32 ? uint2{float_bits(x[0]), float_bits(x[1])} : uint2{pack(x[0], x[1]), pack(x[2], x[3])};
  }
};

// `numbers`: of this GPU's sums so far, one for each block, as all blocks make every sum.
DEVICE void sum_of_devices(const u8* x, u8* out, u32* numbers, u8* const (&memory)[MOST_RANKS], int rank, int block, int blocks) {
  const u32 number = load_now(numbers + block) + 1;
  const int first = block * THREADS + thread(), step = blocks * THREADS;
#pragma unroll 1
  for (int i = first; i < LINES; i += step) {
    const uint2 own = ((const uint2*)x)[i];
#pragma unroll
    for (int to = 0; to < RANKS; to++)
      if (to != rank) store_far(lines_of(memory[to], number, rank) + i, uint4{own.x, number, own.y, number});
  }
  u8* here = memory[0];
#pragma unroll
  for (int r = 1; r < RANKS; r++)
    if (r == rank) here = memory[r];
#pragma unroll 1
  for (int i = first; i < LINES; i += step) {
    Sum sum = {};
#pragma unroll
    for (int r = 0; r < RANKS; r++) sum.add(r == rank ? ((const uint2*)x)[i] : received(lines_of(here, number, r) + i, number));
    ((uint2*)out)[i] = sum.bytes();
  }
  if (thread() == 0) store_now(numbers + block, number);
}

KERNEL(device_sum, THREADS, 1)(
    const u8* x, u8* out, u32* numbers, u8* memory_0, u8* memory_1, u8* memory_2, u8* memory_3, u8* memory_4, u8* memory_5,
    u8* memory_6, u8* memory_7, u64 rank) {
  u8* const memory[MOST_RANKS] = {memory_0, memory_1, memory_2, memory_3, memory_4, memory_5, memory_6, memory_7};
  sum_of_devices(x, out, numbers, memory, (int)rank, block_x(), BLOCKS);
}
