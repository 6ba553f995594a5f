// Sizes of the token kernel. Given: ROWS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, LAYERS, BLOCK, SLOTS,
// GRID, RING, QK_NORM, QKV_BIAS, RMS_EPS and SCALE.

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
// Tokens of a tile of attention, and of the context that is worth another block.
#define TILE 16
#define SPAN (TILE * WARPS)
// Units whose sums are added up together.
#define MOST_UNITS 6
// Units that a warp multiplies together, so that one's sums are not waited for alone.
#define TOGETHER 2

// No arithmetic gives this word, neither as fp32 nor as two bf16: it stands where nothing has been written yet.
#define NOT_YET 0xffffffffu

// The matrices in the order of a layer, then the head.
enum { QKV_MATRIX, OUTPUT_MATRIX, GATE_UP_MATRIX, DOWN_MATRIX, HEAD_MATRIX };
#define OF(matrix, qkv, output, gate_up, down, head) \
  (matrix == QKV_MATRIX ? (qkv) : matrix == OUTPUT_MATRIX ? (output) : matrix == GATE_UP_MATRIX ? (gate_up) : matrix == DOWN_MATRIX ? (down) : (head))

constexpr int max_int(int a, int b) { return a > b ? a : b; }
// A slot of the ring holds a chunk of a unit: STEPS times 16 inputs, of which each warp has a share.
constexpr int largest_chunk() {
  for (int steps = 64; steps >= 16; steps -= 16)
    if (HIDDEN / 16 % steps == 0 && MIXED / 16 % steps == 0 && INNER / 16 % steps == 0) return steps;
  return 0;
}
#define STEPS largest_chunk()
static_assert(STEPS > 0, "inputs come in 256s");
#define SLOT (STEPS * 256)

// What of a matrix is needed while the kernel runs.
struct Projection {
  int matrix, inputs, chunks, units, mine;  // units of this block, at most

  static METHOD Projection of(int matrix) {
    Projection p;
    p.matrix = matrix;
    p.inputs = OF(matrix, HIDDEN, MIXED, HIDDEN, INNER, HIDDEN);
    p.chunks = p.inputs / 16 / STEPS;
    p.units = OF(matrix, QKV, HIDDEN, 2 * INNER, HIDDEN, VOCAB) / UNIT;
    p.mine = (p.units + GRID - 1) / GRID;
    return p;
  }
  METHOD bool normed() const { return matrix != OUTPUT_MATRIX && matrix != DOWN_MATRIX; }
  // Units of this block from its `first` on that are added up together.
  METHOD int count(int first) const {
    return larger(0, smaller(MOST_UNITS, (units - 1 - block_x() + GRID) / GRID - first));
  }
};

// Shared memory: the ring, sums of the warps (twice, by turns), those of attention, angles, weights of norms, barriers.
#define SUMS_FLOATS (WARPS * MOST_UNITS * ROWS * UNIT)
static_assert(RING >= TOGETHER, "the ring holds all units that are multiplied together");
#define SQUARES_FLOATS (WARPS * ROWS)
#define HEAD_WORDS ((GROUP + 2) * HEAD_DIM / 2)
#define MIX_FLOATS (WARPS * GROUP * MIX_WORDS)
#define ANGLE_FLOATS (ROWS * HEAD_DIM)
#define NORM_FLOATS (2 * HEAD_DIM)
#define RESIDUAL_FLOATS ((HIDDEN / UNIT + GRID - 1) / GRID * ROWS * UNIT)
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
// Where a layer's parts begin: what a matrix's product goes to, in their order, behind the first's what attention gives.
#define MIXED_AT QKV_WORDS
#define MIDDLE_AT (MIXED_AT + MIXED_WORDS)
#define INNER_AT (MIDDLE_AT + HIDDEN_WORDS)
#define AFTER_AT (INNER_AT + INNER_WORDS)
#define PARTS_AT (AFTER_AT + HIDDEN_WORDS)
// The turn, then two sets: one is used, the other made ready for the next token.
#define HEADER_WORDS 32
#define SET_WORDS (LAYERS * LAYER_WORDS)
