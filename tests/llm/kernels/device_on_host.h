// The functions of device.cuh for a CPU: what is late on a GPU is late here, and what is not there yet is NaN.
#include <cmath>
#include <type_traits>
#include <utility>

#define HERE(what) host::Place{what, file, line}
#define FROM const char *file = __builtin_FILE(), int line = __builtin_LINE()

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };

#define DEVICE static inline
#define METHOD inline
#define KERNEL(name, threads, blocks) CLUSTER_KERNEL(name, threads, blocks, 1)
#define CLUSTER_KERNEL(name, threads, blocks, cluster) static const int cluster_of_##name = cluster; extern "C" void name
#define SHARED(name) u8* const name = host::current->block->shared

DEVICE int thread() { return host::current->thread; }
DEVICE int lane() { return host::current->thread & 31; }
DEVICE int block_x() { return host::current->block->x; }
DEVICE int block_x_now() { return block_x(); }
// Each look at the clock is a while after the one before.
DEVICE u32 cycles() { static u32 now; return now += 1000; }
DEVICE int block_y() { return host::current->block->y; }
DEVICE int block_z() { return host::current->block->z; }
DEVICE int blocks_x() { return host::grid[0]; }

DEVICE float bits_float(u32 bits) { float x; memcpy(&x, &bits, 4); return x; }
DEVICE u32 float_bits(float x) { u32 bits; memcpy(&bits, &x, 4); return bits; }
DEVICE u32 rounded(float x) {
  u32 bits = float_bits(x);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
DEVICE u32 pack(float first, float second) { return rounded(first) | rounded(second) << 16; }
DEVICE float first_of(u32 word) { return bits_float(word << 16); }
DEVICE float second_of(u32 word) { return bits_float(word & 0xffff0000u); }

DEVICE u32 low_halves(u32 x, u32 y) { return (x & 0xffffu) | (y << 16); }
DEVICE u32 high_halves(u32 x, u32 y) { return (x >> 16) | (y & 0xffff0000u); }
DEVICE float exp2_of(float x) { return exp2f(x); }
DEVICE float rsqrt_of(float x) { return 1 / sqrtf(x); }
DEVICE float max_of(float a, float b) { return fmaxf(a, b); }
DEVICE int smaller(int a, int b) { return a < b ? a : b; }
DEVICE int larger(int a, int b) { return a > b ? a : b; }

struct Shuffled { float x, y; int from; };
DEVICE void conclude_shuffle(Shuffled** lanes) {
  for (int i = 0; i < 32; i++) lanes[i]->y = lanes[lanes[i]->from & 31]->x;
}
DEVICE float shuffle_xor(float x, int mask, FROM) {
  Shuffled said{x, 0, lane() ^ mask};
  host::meet(HERE("shuffle_xor"), said, conclude_shuffle);
  return said.y;
}
DEVICE float shuffle(float x, int source, FROM) {
  Shuffled said{x, 0, source};
  host::meet(HERE("shuffle"), said, conclude_shuffle);
  return said.y;
}
DEVICE void conclude_all(bool** lanes) {
  bool all = true;
  for (int i = 0; i < 32; i++) all = all && *lanes[i];
  for (int i = 0; i < 32; i++) *lanes[i] = all;
}
DEVICE bool all_lanes(bool x, FROM) {
  host::meet(HERE("all_lanes"), x, conclude_all);
  return x;
}
DEVICE void conclude_nothing(int**) {}
DEVICE void sync_lanes(FROM) {
  int nothing = 0;
  host::meet(HERE("sync_lanes"), nothing, conclude_nothing);
}
DEVICE void sync_block(FROM) { host::barrier(HERE("sync_block"), 0, host::threads); }
DEVICE void sync_some(int barrier, int threads, FROM) { host::barrier(HERE("sync_some"), barrier, threads); }

DEVICE void cluster_arrive(FROM) { host::cluster_arrive(HERE("cluster_arrive")); }
DEVICE void cluster_arrive_only(FROM) { host::cluster_arrive(HERE("cluster_arrive_only")); }
DEVICE void cluster_wait(FROM) { host::cluster_wait(HERE("cluster_wait")); }
template <class T> DEVICE T* beside(T* shared, int rank, FROM) {
  host::current->place = HERE("beside");
  host::check_shared(shared, sizeof(T), alignof(T));
  return (T*)host::of_block((const u8*)shared, rank);
}

DEVICE uint4 load(const uint4* from, FROM) {
  host::current->place = HERE("load");
  host::check_global(from, 16, 16);
  return *from;
}
DEVICE uint4 load_early(const uint4* from, FROM) { return load(from, file, line); }
DEVICE void prefetch(const void* from, u32 bytes, FROM) {
  host::current->place = HERE("prefetch");
  if (bytes % 16 || !bytes) host::fail("a prefetch of %u bytes", bytes);
  host::check_global(from, bytes, 16);
}
template <int COUNT> DEVICE void more_registers() {}
template <int COUNT> DEVICE void fewer_registers() {}
// Others have their turn before each: whoever polls would never see anything new.
template <class Word> DEVICE Word load_now(const Word* from, FROM) {
  host::current->place = HERE("load_now");
  host::check_global(from, sizeof(Word), sizeof(Word));
  host::yield();
  return *from;
}
template <class Word> DEVICE void store_now(Word* to, std::common_type_t<Word> x, FROM) {
  host::current->place = HERE("store_now");
  host::check_global(to, sizeof(Word), sizeof(Word));
  host::yield();
  *to = x;
  host::progress++;
}
DEVICE uint4 load_far(const uint4* from, FROM) { return load_now(from, file, line); }
DEVICE void store_far(uint4* to, uint4 x, FROM) { store_now(to, x, file, line); }
DEVICE void rest(FROM) {
  host::current->place = HERE("rest");
  host::yield();
}
DEVICE int watch(const int* shared) { rest(); return *(const volatile int*)shared; }

struct Product { float* c; u32 a[4], b[2]; };
DEVICE void conclude_mma(Product** lanes) {
  static float a[16][16], b[8][16];
  for (int i = 0; i < 32; i++) {
    int g = i / 4, t = i % 4;
    for (int n = 0; n < 4; n++) {
      a[g + n % 2 * 8][2 * t + n / 2 * 8] = first_of(lanes[i]->a[n]);
      a[g + n % 2 * 8][2 * t + n / 2 * 8 + 1] = second_of(lanes[i]->a[n]);
    }
    for (int n = 0; n < 2; n++) b[g][2 * t + 8 * n] = first_of(lanes[i]->b[n]), b[g][2 * t + 8 * n + 1] = second_of(lanes[i]->b[n]);
  }
  for (int i = 0; i < 32; i++)
    for (int n = 0; n < 4; n++) {
      const float *row = a[i / 4 + n / 2 * 8], *column = b[i % 4 * 2 + n % 2];
      float sums[4] = {};
      for (int k = 0; k < 16; k++) sums[k % 4] += row[k] * column[k];
      lanes[i]->c[n] += (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
}
DEVICE void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, FROM) {
  Product said{c, {a0, a1, a2, a3}, {b0, b1}};
  host::meet(HERE("mma"), said, conclude_mma);
}

DEVICE void mma_new(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, FROM) {
  c[0] = c[1] = c[2] = c[3] = 0;
  mma(c, a0, a1, a2, a3, b0, b1, file, line);
}
DEVICE u32 fma_pair(u32 x, u32 y, u32 z) {
  return pack(fmaf(first_of(x), first_of(y), first_of(z)), fmaf(second_of(x), second_of(y), second_of(z)));
}
DEVICE float half_of(u16 bits) {
  _Float16 x;
  memcpy(&x, &bits, 2);
  return (float)x;
}

struct Matrices { u32* out; const u8* row; bool turned; };
DEVICE void conclude_matrices(Matrices** lanes) {
  for (int i = 0; i < 32; i++)
    for (int n = 0; n < 4; n++) {
      int g = i / 4, t = i % 4;
      auto at = [&](int row, int column) { return (u32)((const u16*)lanes[8 * n + row]->row)[column]; };
      lanes[i]->out[n] = lanes[i]->turned ? at(2 * t, g) | at(2 * t + 1, g) << 16 : at(g, 2 * t) | at(g, 2 * t + 1) << 16;
    }
}
DEVICE void load_matrices(u32* out, const void* shared, FROM) {
  host::current->place = HERE("load_matrices");
  host::check_shared(shared, 16, 16);
  Matrices said{out, (const u8*)shared, false};
  host::meet(HERE("load_matrices"), said, conclude_matrices);
}
DEVICE void load_matrices_turned(u32* out, const void* shared, FROM) {
  host::current->place = HERE("load_matrices_turned");
  host::check_shared(shared, 16, 16);
  Matrices said{out, (const u8*)shared, true};
  host::meet(HERE("load_matrices_turned"), said, conclude_matrices);
}
struct Turned { u32 word, turned; };
DEVICE void conclude_transpose(Turned** lanes) {
  auto at = [&](int row, int column) { return lanes[row * 4 + column / 2]->word >> column % 2 * 16 & 0xffff; };
  for (int i = 0; i < 32; i++) lanes[i]->turned = at(i % 4 * 2, i / 4) | at(i % 4 * 2 + 1, i / 4) << 16;
}
DEVICE u32 transpose(u32 word, FROM) {
  Turned said{word, 0};
  host::meet(HERE("transpose"), said, conclude_transpose);
  return said.turned;
}

// Done only when somebody waits for them; NaN until then.
DEVICE void copy16(void* shared, const void* from, bool valid, FROM) {
  host::current->place = HERE("copy16");
  host::check_shared(shared, 16, 16);
  if (valid) host::check_global(from, 16, 16);
  memset(shared, 0xff, 16);
  host::current->copies.push_back({(u8*)shared, valid ? (const u8*)from : nullptr, 16, nullptr, 0});
}
DEVICE void copies_commit() { host::current->groups.push_back(host::current->copies.size()); }
template <int LEFT> DEVICE void copies_wait() {
  auto &copies = host::current->copies;
  auto &groups = host::current->groups;
  if (groups.size() <= LEFT) return;
  size_t ended = groups[groups.size() - 1 - LEFT];
  for (size_t i = 0; i < ended; i++) copies[i].from ? (void)memcpy(copies[i].to, copies[i].from, 16) : (void)memset(copies[i].to, 0, 16);
  copies.erase(copies.begin(), copies.begin() + ended);
  groups.erase(groups.begin(), groups.end() - LEFT);
  for (size_t& group : groups) group -= ended;
}

struct Bar { u64 phase : 1, arrivals : 15, pending : 16; int64_t bytes : 32; };
static_assert(sizeof(Bar) == 8, "a barrier is 8 bytes of shared memory");
DEVICE Bar& bar_at(u64* bar, const host::Place& place) {
  host::current->place = place;
  host::check_shared(bar, 8, 8);
  Bar& found = *(Bar*)bar;
  if (found.arrivals == 0x7fff) host::fail("a barrier that nobody has initialised");
  return found;
}
DEVICE void turn_bar(Bar& bar) {
  if (bar.pending || bar.bytes) return;
  bar.phase ^= 1, bar.pending = bar.arrivals, host::progress++;
}
DEVICE void arrived(void* bar, u32 bytes) {
  ((Bar*)bar)->bytes -= bytes;
  turn_bar(*(Bar*)bar);
}
DEVICE void bar_init(u64* bar, int arrivals, FROM) {
  host::current->place = HERE("bar_init");
  host::check_shared(bar, 8, 8);
  Bar made{};
  made.arrivals = made.pending = arrivals;
  memcpy(bar, &made, 8);
}
DEVICE void bars_ready() {}
DEVICE void bar_expect(u64* bar, u32 bytes, FROM) {
  Bar& found = bar_at(bar, HERE(bytes ? "bar_expect" : "bar_arrive"));
  if (!found.pending) host::fail("more arrive than the barrier waits for");
  found.bytes += bytes, found.pending--;
  turn_bar(found);
}
DEVICE void bar_arrive(u64* bar, FROM) { bar_expect(bar, 0, file, line); }
DEVICE void bar_wait(u64* bar, u32 parity, FROM) {
  Bar& found = bar_at(bar, HERE("bar_wait"));
  host::wait([](const host::Fiber& fiber) { return ((const Bar*)fiber.subject)->phase == (fiber.detail & 1); }, &found, parity);
}
DEVICE void bulk_copy(void* shared, const void* from, u32 bytes, u64* bar, FROM) {
  Bar& found = bar_at(bar, HERE("bulk_copy"));
  if (bytes % 16 || !bytes) host::fail("a bulk copy of %u bytes", bytes);
  host::check_shared(shared, bytes, 16);
  host::check_global(from, bytes, 16);
  memset(shared, 0xff, bytes);
  host::current->block->copies.push_back({(u8*)shared, (const u8*)from, bytes, &found, host::turn + 1 + (int)host::chance(12)});
}
DEVICE void push16(void* there, uint4 x, u64* bar, FROM) {
  host::current->place = HERE("push16");
  if ((uintptr_t)there % 16) host::fail("not aligned to 16");
  if (((Bar*)bar)->arrivals == 0x7fff) host::fail("a barrier that nobody has initialised");
  memcpy(there, &x, 16);
  arrived(bar, 16);
}

DEVICE void let_next_begin() {}
DEVICE void await_previous() { host::current->awaited = true; }
DEVICE void shared_ready() {}
DEVICE void products_begin(FROM) { sync_lanes(file, line); }
DEVICE void products_commit() {}
DEVICE void products_wait(FROM) { sync_lanes(file, line); }
// A thread's own elements: shared memory holds all operands.
template <int WORDS> DEVICE void product_64(float (&c)[WORDS], const u8* a, const u8* b, int step, FROM) {
  host::current->place = HERE("product_64");
  host::check_shared(a, 64 * 128, 1024), host::check_shared(b, WORDS * 2 * 128, 1024);
  auto at = [&](const u8* rows, int row, int k) {
    return bits_float((u32)*(const u16*)(rows + row * 128 + (((2 * step + k / 8) ^ row % 8) * 16) + k % 8 * 2) << 16);
  };
  int r = thread() % 128 / 32 * 16 + lane() / 4, n = lane() % 4 * 2;
  for (int i = 0; i < WORDS; i++)
    for (int k = 0; k < 16; k++) c[i] += at(a, r + i % 4 / 2 * 8, k) * at(b, i / 4 * 8 + n + i % 2, k);
}
DEVICE void bulk_copy_kept(void* shared, const void* from, u32 bytes, u64* bar, FROM) {
  bulk_copy(shared, from, bytes, bar, file, line);
}
DEVICE void push(void* there, const void* shared, u32 bytes, u64* bar, FROM) {
  host::current->place = HERE("push");
  if (bytes % 16 || !bytes) host::fail("a push of %u bytes", bytes);
  if (((Bar*)bar)->arrivals == 0x7fff) host::fail("a barrier that nobody has initialised");
  host::check_shared(shared, bytes, 16);
  memset(there, 0xff, bytes);
  host::current->block->copies.push_back({(u8*)there, (const u8*)shared, bytes, bar, host::turn + 1 + (int)host::chance(12)});
}

// From the format's definition; NaN (0x7f) stays NaN here, so that what nobody may see is found where it is seen.
DEVICE float of_e4m3(u32 code) {
  u32 exponent = code >> 3 & 15, mantissa = code & 7;
  float size = exponent ? ldexpf(8 + mantissa, (int)exponent - 10) : ldexpf(mantissa, -9);
  return (code & 0x7f) == 0x7f ? NAN : code & 0x80 ? -size : size;
}
DEVICE u32 e4m3_code(float x) {
  u32 best = 0, sign = float_bits(x) >> 31 << 7;
  if (x != x) return sign | 0x7f;
  // Codes are in the order of their numbers: the nearest, and of two equally near the even one.
  for (u32 code = 1; code < 0x7f; code++) {
    float before = fabsf(fabsf(x) - of_e4m3(best)), here = fabsf(fabsf(x) - of_e4m3(code));
    if (here < before || (here == before && code % 2 == 0)) best = code;
  }
  return sign | (fabsf(x) >= 448 ? 0x7e : best);
}
DEVICE u16 pack_e4m3(float first, float second) { return (u16)(e4m3_code(first) | e4m3_code(second) << 8); }
DEVICE u32 e4m3_high(u32 codes, u32 factors) {
  const double unit = ldexp(1., -120), low = first_of(factors) * unit, high = second_of(factors) * unit;
  return pack((float)(of_e4m3(codes >> 8 & 0xff) * low), (float)(of_e4m3(codes >> 24) * high));
}

template <class... A, size_t... I> static void invoke(void (*kernel)(A...), void** pointers, std::index_sequence<I...>) {
  kernel((A)pointers[I]...);
}
// Null, or what went wrong.
template <class... A> static const char* emulate(
    void (*kernel)(A...), void** pointers, int count, const host::Range* ranges, int ranges_count, const int* grid, int threads, u64 shared, int cluster, int resident, u64 seed) {
  if (count != sizeof...(A)) return "the kernel has another number of parameters";
  memcpy(host::grid, grid, sizeof host::grid), host::cluster = cluster;
  if (grid[0] % cluster) return "the grid is no multiple of the cluster";
  host::threads = threads, host::shared_bytes = shared, host::ranges = ranges, host::range_count = ranges_count;
  return host::launch([=] { invoke(kernel, pointers, std::index_sequence_for<A...>{}); }, resident, seed, arrived);
}
#undef HERE
