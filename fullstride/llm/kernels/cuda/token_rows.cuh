// Rows between blocks: written a word at a time, read as mma's first operand, and both their own signal.
// With 8 rows or fewer a lane's 16 bytes are its words of two steps of 16 inputs, else its four words of one.

#define WIDE (ROWS > 8)
#define CELL_INPUTS (WIDE ? 16 : 32)
#define CELL_LANES (WIDE ? 32 : 4 * ROWS)

// Where the word with inputs `input` and `input + 1` (even) of a row is.
DEVICE int word_of(int row, int input) {
  int step = input / 16 % 2, half = input / 8 % 2, pair = input % 8 / 2;
  int own = WIDE ? 2 * half + row / 8 : 2 * step + half;
  return ((input / CELL_INPUTS * CELL_LANES) + row % 8 * 4 + pair) * 4 + own;
}

DEVICE bool there(uint4 x) { return x.x != NOT_YET && x.y != NOT_YET && x.z != NOT_YET && x.w != NOT_YET; }
DEVICE bool there(uint2 x) { return x.x != NOT_YET && x.y != NOT_YET; }

// Read those of the `N` values at place(0), place(1), ... again that are not there, until all of them are.
template <int N, class T, class Place> DEVICE void await_rest(T (&x)[N], Place place) {
  bool all = false;
  while (!all) {
    all = true;
#pragma unroll
    for (int i = 0; i < N; i++)
      if (!there(x[i])) {
        x[i] = load_now(place(i));
        all = false;
      }
    if (!all) rest();
  }
}
template <int N, class T, class Place> DEVICE void await(T (&x)[N], Place place) {
#pragma unroll
  for (int i = 0; i < N; i++) x[i] = load_now(place(i));
  await_rest(x, place);
}

// What is written is for one token: the same place in the other set is made ready for the next one.
struct Sets {
  u32* now;
  u32* other;

  METHOD void put(int at, u32 x) const {
    store_now(now + at, x);
    store_now(other + at, NOT_YET);
  }
  METHOD void put(int at, u32 x, u32 y) const {
    store_now((uint2*)(now + at), uint2{x, y});
    store_now((uint2*)(other + at), uint2{NOT_YET, NOT_YET});
  }
  METHOD Sets from(int words) const { return Sets{now + words, other + words}; }
};

// Of a chunk a warp's steps and its lanes' 16 bytes; chunks of rows that are on their way at once.
#define WARP_STEPS (STEPS / WARPS)
#define CELLS (WIDE ? WARP_STEPS : WARP_STEPS / 2)
#define MOST_CHUNKS (max_int(max_int(HIDDEN, MIXED), INNER) / 16 / STEPS)
constexpr int most_flight() { return 24 / CELLS < MOST_CHUNKS ? 24 / CELLS : MOST_CHUNKS; }
#define FLIGHT most_flight()

// A warp's share of up to FLIGHT chunks, as words of mma's first operand.
struct Rows {
  uint4 cell[FLIGHT * CELLS];

  // `count` chunks from `first` on of rows that other blocks write to `words` meanwhile, as soon as all of them are there:
  // asked for together, since an answer takes long. Other lanes than those with a row have zeros.
  METHOD void read(const u32* words, int first, int count, int warp) {
    constexpr int next = STEPS * 16 / CELL_INPUTS * CELL_LANES;
    const uint4* from = (const uint4*)words + first * next + warp * CELLS * CELL_LANES + lane();
    bool mine = lane() < CELL_LANES;
    // Of few rows there are few words, and all blocks that ask for them again and again keep the writers from them.
    if (ROWS <= 4 && mine)
      while (!there(load_now(from + (count - 1) * next + (CELLS - 1) * CELL_LANES))) rest();
    bool all = false;
#pragma unroll 1
    while (!all) {
      all = true;
#pragma unroll
      for (int i = 0; i < FLIGHT * CELLS; i++) {
        cell[i] = uint4{0, 0, 0, 0};
        if (mine && i / CELLS < count) cell[i] = load_now(from + i / CELLS * next + i % CELLS * CELL_LANES);
      }
#pragma unroll
      for (int i = 0; i < FLIGHT * CELLS; i++) all = all && there(cell[i]);
      if (!all) rest();
    }
    sync_lanes();
  }
  // The same of a table, rows of which are one each for `ids`.
  METHOD void look_up(const u32* table, const int* ids, int first, int count, int warp) {
    int row = lane() / 4, pair = lane() % 4;
    const u32 *low = table + (u64)ids[smaller(row, ROWS - 1)] * (HIDDEN / 2), *high = table + (u64)ids[smaller(row + 8, ROWS - 1)] * (HIDDEN / 2);
#pragma unroll
    for (int i = 0; i < FLIGHT * WARP_STEPS; i++) {
      int at = ((first + i / WARP_STEPS) * STEPS + warp * WARP_STEPS + i % WARP_STEPS) * 8 + pair;
      bool there = i / WARP_STEPS < count;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        set(i, 0, half, there && row < ROWS ? low[at + 4 * half] : 0);
        if (WIDE) set(i, 1, half, there ? high[at + 4 * half] : 0);
      }
    }
  }
  METHOD void set(int step, int high, int half, u32 x) {
    uint4& c = cell[WIDE ? step : step / 2];
    int own = WIDE ? 2 * half + high : 2 * (step % 2) + half;
    (own == 0 ? c.x : own == 1 ? c.y : own == 2 ? c.z : c.w) = x;
  }
  METHOD u32 word(int step, int high, int half) const {
    const uint4& c = cell[WIDE ? step : step / 2];
    int own = WIDE ? 2 * half + high : 2 * (step % 2) + half;
    return own == 0 ? c.x : own == 1 ? c.y : own == 2 ? c.z : c.w;
  }
  // Adds this lane's part of the rows' sums of squares; chunks that are not there are zeros.
  METHOD void square(float (&sums)[2]) const {
#pragma unroll
    for (int i = 0; i < FLIGHT * WARP_STEPS; i++)
#pragma unroll
      for (int own = 0; own < (WIDE ? 4 : 2); own++) {
        u32 x = word(i, own / 2, own % 2);
        sums[own / 2] += first_of(x) * first_of(x) + second_of(x) * second_of(x);
      }
  }
};
