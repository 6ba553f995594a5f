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

// The `N` values at place(0), place(1), ... of each lane that is `asking`, else zeros, as soon as all of them are there: asked
// for together, since an answer takes long, and without lanes that part, which cost a third of a microsecond to bring together.
template <int N, class T, class Place> DEVICE void await(T (&x)[N], bool asking, Place place) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    x[i] = T{};
    if (asking) x[i] = load_now(place(i));
  }
  while (true) {
    bool all = true;
#pragma unroll
    for (int i = 0; i < N; i++) all = all && there(x[i]);
    if (all_lanes(all)) break;
    rest();
#pragma unroll
    for (int i = 0; i < N; i++)
      if (!there(x[i])) x[i] = load_now(place(i));
  }
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

// A warp's share of `M::steps` steps of 16 inputs, as words of mma's first operand.
template <class M> struct Rows {
  static constexpr int steps = M::steps / WARPS, cells = WIDE ? steps : steps / 2;
  uint4 cell[cells];

  // Of chunk `chunk` of rows that are in `words`; other lanes than those with a row have none.
  static METHOD const uint4* place(const u32* words, int chunk, int warp) {
    return (const uint4*)words + (chunk * M::steps + warp * steps) * 16 / CELL_INPUTS * CELL_LANES + lane();
  }
  // Rows of a table, one each for `ids`.
  METHOD void look_up(const u32* table, const int* ids, int chunk, int warp) {
    int row = lane() / 4, pair = lane() % 4;
#pragma unroll
    for (int i = 0; i < steps; i++) {
      int at = (chunk * M::steps + warp * steps + i) * 8 + pair;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        set(i, 0, half, row < ROWS ? table[(u64)ids[row] * (M::in / 2) + at + 4 * half] : 0);
        if (WIDE) set(i, 1, half, table[(u64)ids[smaller(row + 8, ROWS - 1)] * (M::in / 2) + at + 4 * half]);
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
  // Adds this lane's part of the rows' sums of squares.
  METHOD void square(float (&sums)[2]) const {
#pragma unroll
    for (int i = 0; i < steps; i++)
#pragma unroll
      for (int own = 0; own < (WIDE ? 4 : 2); own++) {
        u32 x = word(i, own / 2, own % 2);
        sums[own / 2] += first_of(x) * first_of(x) + second_of(x) * second_of(x);
      }
  }
};

// `N` chunks from `first` on, as soon as all of them are there.
template <class M, int N> DEVICE void read_all(Rows<M> (&rows)[N], const u32* words, int first, int warp) {
  constexpr int cells = Rows<M>::cells;
  uint4 x[N * cells];
  auto place = [=](int i) {
    int chunk = smaller(first + i / cells, M::chunks - 1);
    return Rows<M>::place(words, chunk, warp) + i % cells * CELL_LANES;
  };
  await(x, lane() < CELL_LANES, place);
#pragma unroll
  for (int i = 0; i < N * cells; i++) rows[i / cells].cell[i % cells] = x[i];
}
