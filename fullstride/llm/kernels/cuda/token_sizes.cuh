// Sizes of the token kernel. Given: ROWS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, LAYERS, BLOCK, SLOTS,
// GRID, RING, PACE, QK_NORM, QKV_BIAS, RMS_EPS and SCALE.

#define WARPS 8
#define CONSUMERS (32 * WARPS)
// Of four more warps one fills the ring, the others fetch ahead; four leave more registers to the rest than one would.
#define THREADS (CONSUMERS + 128)
// Features of a unit: what one block computes at once, whole sums over all inputs.
#define UNIT 8
#define GROUP (HEADS / KV_HEADS)
#define QKV ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
#define MIXED (HEADS * HEAD_DIM)
// Blocks that may share one row and KV head.
#define SPLITS larger(1, smaller(16, GRID / (ROWS * KV_HEADS)))
// Parts of a context that are awaited together.
#define TOGETHER 8
// Tokens of a tile of attention, and of the context that is worth another block.
#define TILE 16
#define SPAN (TILE * WARPS)
// Units whose sums are added up together.
#define MOST_UNITS 6
#define HEAD_UNITS 4

// No arithmetic gives this word, neither as fp32 nor as two bf16: it stands where nothing has been written yet.
#define NOT_YET 0xffffffffu

constexpr int largest_chunk(int inputs) {
  for (int steps = 64; steps >= 16; steps -= 16)
    if (inputs / 16 % steps == 0) return steps;
  return 0;
}
constexpr int units_of(int features) { return (features + UNIT - 1) / UNIT; }
constexpr int most_units(int features) { return (units_of(features) + GRID - 1) / GRID; }

// A matrix with that many inputs and outputs: a slot of the ring holds `steps` times 16 inputs of a unit.
template <int IN, int OUT, int MOST = MOST_UNITS> struct Matrix {
  static constexpr int in = IN, out = OUT, units = units_of(OUT), mine = most_units(OUT);
  static constexpr int group = mine < MOST ? mine : MOST, steps = largest_chunk(IN), chunks = IN / 16 / steps, bytes = steps * 256;
  static_assert(IN % 256 == 0, "inputs come in 256s");
};
typedef Matrix<HIDDEN, QKV> Qkv;
typedef Matrix<MIXED, HIDDEN> Output;
typedef Matrix<HIDDEN, 2 * INNER> GateUp;
typedef Matrix<INNER, HIDDEN> Down;
typedef Matrix<HIDDEN, VOCAB, HEAD_UNITS> Head;

constexpr int max_int(int a, int b) { return a > b ? a : b; }
#define SLOT max_int(max_int(Qkv::bytes, Output::bytes), Down::bytes)

// Shared memory: the ring, sums of the warps (twice, by turns), those of attention, angles, weights of norms, barriers.
#define SUMS_FLOATS (WARPS * MOST_UNITS * ROWS * UNIT)
static_assert(RING >= MOST_UNITS, "the ring holds all units whose sums are added up together");
#define SQUARES_FLOATS (WARPS * ROWS)
#define HEAD_WORDS ((GROUP + 2) * HEAD_DIM / 2)
#define MIX_FLOATS (WARPS * GROUP * MIX_WORDS)
#define ANGLE_FLOATS (ROWS * HEAD_DIM)
#define NORM_FLOATS (2 * HEAD_DIM)
#define RESIDUAL_FLOATS (Output::mine * ROWS * UNIT)
// Of the block's first table, as many as there is room for; a longer one is read where it is.
#define TABLE_WORDS 1024

// Words between blocks: of one layer, where each row of bf16 pairs is in the order of mma's first operand.
#define QKV_WORDS (ROWS * QKV)
#define MIXED_WORDS (ROWS * MIXED / 2)
#define HIDDEN_WORDS (ROWS * HIDDEN / 2)
#define INNER_WORDS (ROWS * INNER / 2)
#define PART_WORDS (HEAD_DIM + 2)
#define PARTS_WORDS (ROWS * KV_HEADS * SPLITS * GROUP * PART_WORDS)
#define LAYER_WORDS (QKV_WORDS + MIXED_WORDS + 2 * HIDDEN_WORDS + INNER_WORDS + PARTS_WORDS)
// The turn, then two sets: one is used, the other made ready for the next token.
#define HEADER_WORDS 32
#define SET_WORDS (LAYERS * LAYER_WORDS)
