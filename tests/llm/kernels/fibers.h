// A grid of CUDA threads on one thread of a CPU: each is a fiber, all blocks that fit are alive together and take turns,
// in an order of the seed's. A thread that waits says where, so that a deadlock can be told.
#include <sys/mman.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace host {

struct Place {
  const char* what;
  const char* file;
  int line;
};
struct Copy {
  uint8_t* to;
  const uint8_t* from;
  uint32_t bytes;
  void* bar;
  int due;
};
struct Block;
struct Fiber {
  void* stack;
  Block* block;
  int thread;
  bool done, awaited;
  Place place;
  // Not resumed while `*watched` is `seen`, or while `blocked` says so.
  const uint32_t* watched;
  uint32_t seen, cluster_seen;
  bool (*blocked)(const Fiber&);
  const void* subject;
  uint32_t detail;
  std::vector<Copy> copies;
  std::vector<size_t> groups;
};
struct Warp {
  int met;
  uint32_t generation;
  Place place;
  void* said[32];
};
struct Barrier {
  int met, wanted;
  uint32_t generation;
};
struct Cluster {
  int met, left;
  uint32_t generation;
};
struct Block {
  int x, y, z, left;
  Cluster* cluster;
  uint8_t* shared;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barriers[16];
  std::vector<Copy> copies;
};
struct Range {
  const uint8_t* start;
  uint64_t bytes;
  uint64_t late;  // what kernels before this one write: there once a thread has awaited them
};

static const size_t STACK = (64 << 10) + 832, CANARY = 0x5ca1ab1e;  // no two stacks in the same lines of a cache
static const int PATIENCE = 4000;                                   // turns of all without any progress
static int grid[3], threads, cluster, turn;
static size_t shared_bytes;
static const Range* ranges;
static int range_count;
static std::function<void()>* body;
static Fiber* current;
static void* scheduler;
static std::string failure;
// `progress` is what may let others go on; `meetings` only lets a warp go on.
static uint64_t progress, meetings, randomness;
static bool shuffled;

static uint32_t chance(uint32_t below) {
  if (!shuffled) return 0;
  randomness ^= randomness << 13, randomness ^= randomness >> 7, randomness ^= randomness << 17;
  return (randomness >> 20) % below;
}

#if defined(__x86_64__)
extern "C" void host_switch(void** from, void* to);
asm(R"(
.text
host_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
static void* prepare(uint8_t* stack, void (*entry)()) {
  auto top = (void**)((uintptr_t)(stack + STACK) & ~(uintptr_t)63);
  top[-2] = (void*)entry;
  return top - 8;
}
#else
#include <ucontext.h>
static void host_switch(void** from, void* to) {
  ucontext_t here;
  *from = &here;
  swapcontext(&here, (ucontext_t*)to);
}
static void* prepare(uint8_t* stack, void (*entry)()) {
  auto context = (ucontext_t*)(stack + 64);
  getcontext(context);
  context->uc_stack.ss_sp = stack + 64 + sizeof(ucontext_t), context->uc_stack.ss_size = STACK - 64 - sizeof(ucontext_t);
  makecontext(context, entry, 0);
  return context;
}
#endif

static void yield() { host_switch(&current->stack, scheduler); }

[[noreturn]] static void fail(const char* format, ...) {
  char text[400];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  const Place& at = current->place;
  const Block& b = *current->block;
  failure = std::string(text) + " (" + at.what + " at " + at.file + ":" + std::to_string(at.line) + ", block " +
            std::to_string(b.x) + " " + std::to_string(b.y) + " " + std::to_string(b.z) + ", thread " +
            std::to_string(current->thread) + ")";
  for (;;) yield();
}

static void watch(const uint32_t& generation) {
  current->watched = &generation, current->seen = generation;
  yield();
  current->watched = nullptr;
}
static void wait(bool (*blocked)(const Fiber&), const void* subject, uint32_t detail) {
  current->subject = subject, current->detail = detail, current->blocked = blocked;
  if (blocked(*current)) yield();
  current->blocked = nullptr;
}

// All lanes of a warp say something; the last one does what follows from it for all of them.
template <class Said> static void meet(const Place& place, Said& said, void (*conclude)(Said**)) {
  current->place = place;
  Warp& warp = current->block->warps[current->thread / 32];
  if (!warp.met) warp.place = place;
  if (strcmp(warp.place.what, place.what) || warp.place.line != place.line)
    fail("lanes of a warp meet at different places: another is at %s, %s:%d", warp.place.what, warp.place.file, warp.place.line);
  warp.said[current->thread % 32] = &said;
  if (++warp.met < 32) return watch(warp.generation);
  warp.met = 0, warp.generation++, meetings++;
  conclude((Said**)warp.said);
}

static void barrier(const Place& place, int which, int wanted) {
  current->place = place;
  if (which < 0 || which > 15 || wanted % 32 || wanted > threads) fail("barrier %d for %d threads", which, wanted);
  Barrier& barrier = current->block->barriers[which];
  if (barrier.met && barrier.wanted != wanted) fail("barrier %d for %d and for %d threads", which, barrier.wanted, wanted);
  barrier.wanted = wanted;
  if (++barrier.met < wanted) return watch(barrier.generation);
  barrier.met = 0, barrier.generation++, progress++;
}

// Blocks that have ended count as arrived.
static void cluster_turn(Cluster& cluster) {
  if (cluster.met == cluster.left) cluster.met = 0, cluster.generation++, progress++;
}
static void cluster_arrive(const Place& place) {
  current->place = place;
  Cluster& cluster = *current->block->cluster;
  current->cluster_seen = cluster.generation, cluster.met++;
  cluster_turn(cluster);
}
static void cluster_wait(const Place& place) {
  current->place = place;
  current->watched = &current->block->cluster->generation, current->seen = current->cluster_seen;
  if (*current->watched == current->seen) yield();
  current->watched = nullptr;
}
static const uint8_t* of_block(const uint8_t* shared, int rank) {
  if (rank < 0 || rank >= cluster) fail("block %d of a cluster of %d", rank, cluster);
  const Block& other = current->block[rank - current->block->x % cluster];
  if (!other.left) fail("the memory of a block that has ended: %d of the cluster", rank);
  return other.shared + (shared - current->block->shared);
}

static void check_shared(const void* at, size_t bytes, size_t align) {
  size_t offset = (const uint8_t*)at - current->block->shared;
  if (offset > shared_bytes || offset + bytes > shared_bytes) fail("outside of shared memory: byte %ld of %zu", (long)offset, shared_bytes);
  if (offset % align) fail("not aligned to %zu: byte %zu of shared memory", align, offset);
}
static void check_global(const void* at, size_t bytes, size_t align) {
  static int last = 0;
  auto p = (const uint8_t*)at;
  if ((uintptr_t)p % align) fail("not aligned to %zu: %p", align, at);
  for (int n = 0; n < range_count; n++, last++) {
    if (last >= range_count) last = 0;
    if (p < ranges[last].start || p + bytes > ranges[last].start + ranges[last].bytes) continue;
    if (ranges[last].late && !current->awaited) fail("array %d is read before the kernels that write it have ended", last);
    return;
  }
  std::string where;
  for (int n = 0; n < range_count; n++) {
    long offset = p - ranges[n].start;
    if (offset > -4096 && offset < (long)ranges[n].bytes + 4096)
      where += ": byte " + std::to_string(offset) + " of the " + std::to_string(ranges[n].bytes) + " of array " + std::to_string(n);
  }
  fail("outside of the operands and results%s", where.c_str());
}

static void enter() {
  current->place = {"start", "", 0};
  (*body)();
  current->done = true, current->block->left--, progress++, meetings++;
  current->block->cluster->left--;
  cluster_turn(*current->block->cluster);
  for (;;) yield();
}

static void start(Block& block, uint8_t* stacks, int index) {
  block.x = index % grid[0], block.y = index / grid[0] % grid[1], block.z = index / grid[0] / grid[1];
  block.left = threads;
  if (index % cluster == 0) *block.cluster = {0, threads * cluster, 0};
  memset(block.shared, 0xff, shared_bytes);
  block.fibers.assign(threads, Fiber{});
  block.warps.assign((threads + 31) / 32, Warp{});
  memset(block.barriers, 0, sizeof block.barriers);
  for (int i = 0; i < threads; i++) {
    uint8_t* stack = stacks + i * STACK;
    memcpy(stack, &CANARY, sizeof CANARY);
    block.fibers[i].stack = prepare(stack, enter), block.fibers[i].block = &block, block.fibers[i].thread = i;
  }
}

static bool ready(const Fiber& fiber) {
  if (fiber.done) return false;
  if (fiber.watched) return *fiber.watched != fiber.seen;
  return !fiber.blocked || !fiber.blocked(fiber);
}

// A warp's turn: on as long as its lanes meet, but not for ever.
static void run_warp(Block& block, int warp) {
  int lanes = threads - warp * 32 < 32 ? threads - warp * 32 : 32, passes = 16 - chance(16);
  for (int pass = 0; pass < passes; pass++) {
    uint64_t before = meetings;
    int first = chance(lanes), step = chance(2) ? lanes - 1 : 1;
    for (int n = 0; n < lanes; n++) {
      Fiber& fiber = block.fibers[warp * 32 + (first + n * step) % lanes];
      if (!ready(fiber)) continue;
      current = &fiber;
      host_switch(&scheduler, fiber.stack);
      if (!failure.empty()) return;
    }
    if (meetings == before) return;
  }
}

static std::string waiting(const std::vector<Block>& blocks) {
  std::map<std::string, std::pair<int, std::string>> places;
  for (const Block& block : blocks)
    for (const Fiber& fiber : block.fibers) {
      if (fiber.done) continue;
      const Place& at = fiber.place;
      auto& place = places[std::string(at.what) + " at " + at.file + ":" + std::to_string(at.line)];
      if (!place.first++) place.second = "block " + std::to_string(block.x) + " " + std::to_string(block.y) + " " + std::to_string(block.z) + ", thread " + std::to_string(fiber.thread);
    }
  std::string text = "deadlock:";
  for (auto& [name, place] : places) text += "\n  " + std::to_string(place.first) + " threads in " + name + ", as " + place.second;
  return text;
}

static void perform(const Copy& copy, void (*arrived)(void*, uint32_t)) {
  memcpy(copy.to, copy.from, copy.bytes);
  arrived(copy.bar, copy.bytes), progress++;
}
static void perform_due(Block& block, void (*arrived)(void*, uint32_t)) {
  for (size_t i = 0; i < block.copies.size();) {
    if (block.copies[i].due > turn) { i++; continue; }
    Copy copy = block.copies[i];
    block.copies[i] = block.copies.back(), block.copies.pop_back();
    perform(copy, arrived);
  }
}

static const char* launch(std::function<void()> kernel, int resident, uint64_t seed, void (*arrived)(void*, uint32_t)) {
  static uint8_t *stacks = nullptr, *memory = nullptr;
  static size_t stacks_size = 0, memory_size = 0;
  int total = grid[0] * grid[1] * grid[2], most = resident / cluster * cluster;
  int alive = total < most ? total : most, next = alive, left = total;
  size_t shared_room = (shared_bytes + 2047) / 1024 * 1024, need = STACK * threads * alive + 64;
  auto room = [](uint8_t*& at, size_t& size, size_t wanted) {
    if (size >= wanted) return;
    if (at) munmap(at, size);
    at = (uint8_t*)mmap(nullptr, size = wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) abort();
  };
  room(stacks, stacks_size, need), room(memory, memory_size, shared_room * alive + 1024);
  body = &kernel, turn = 0, progress = meetings = 0, shuffled = seed, randomness = seed * 0x9e3779b97f4a7c15u + 1, failure.clear();
  std::vector<Block> blocks(alive);
  std::vector<Cluster> clusters(alive / cluster);
  std::vector<std::pair<int, int>> order;
  for (int b = 0; b < alive; b++) {
    blocks[b].shared = (uint8_t*)(((uintptr_t)memory + 1023) / 1024 * 1024) + shared_room * b;
    blocks[b].cluster = &clusters[b / cluster];
    start(blocks[b], stacks + STACK * threads * b, b);
    for (int w = 0; w < (threads + 31) / 32; w++) order.push_back({b, w});
  }
  for (int idle = 0; left; turn++) {
    uint64_t before = progress;
    for (size_t i = order.size(); shuffled && i-- > 1;) std::swap(order[i], order[chance(i + 1)]);
    for (auto [b, w] : order) {
      if (!blocks[b].left) continue;
      if (!blocks[b].copies.empty()) {
        current = &blocks[b].fibers[0];
        perform_due(blocks[b], arrived);
      }
      run_warp(blocks[b], w);
      if (!failure.empty()) return failure.c_str();
      if (blocks[b].left) continue;
      for (int i = 0; i < threads; i++)
        if (memcmp(stacks + STACK * (threads * b + i), &CANARY, sizeof CANARY)) return "a thread's stack is too small";
      if (!blocks[b].copies.empty()) return "a block ends while copies into its shared memory are under way";
      left--;
      // A peer that still reads it finds NaN.
      memset(blocks[b].shared, 0xff, shared_bytes);
      if (clusters[b / cluster].left || next == total) continue;
      for (int i = b / cluster * cluster, end = i + cluster; i < end; i++) start(blocks[i], stacks + STACK * threads * i, next++);
    }
    idle = progress == before ? idle + 1 : 0;
    if (idle > PATIENCE) return (failure = waiting(blocks)).c_str();
  }
  return nullptr;
}

}  // namespace host
