// What the kernels use of a GPU, in one place: tests put the same functions, made of C++ for a CPU, before the
// kernels instead of this file. NVRTC compiles it without any header.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE static __device__ __forceinline__
#define METHOD __device__ __forceinline__
#define KERNEL(name, threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks) name
// Blocks that follow each other in x and run at the same time, `cluster` of them (at most 8; before Hopper 1).
#if __CUDA_ARCH__ >= 900
#define CLUSTER_KERNEL(name, threads, blocks, cluster) \
  extern "C" __global__ void __cluster_dims__(cluster, 1, 1) __launch_bounds__(threads, blocks) name
#else
#define CLUSTER_KERNEL(name, threads, blocks, cluster) KERNEL(name, threads, blocks)
#endif
#define SHARED(name) extern __shared__ __align__(1024) u8 name[]

DEVICE int thread() { return threadIdx.x; }
DEVICE int lane() { return threadIdx.x & 31; }
DEVICE int block_x() { return blockIdx.x; }
// The same, but read when it is asked for, where no register is left to keep it in.
DEVICE int block_x_now() {
  int x;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  return x;
}
DEVICE u32 cycles() { return clock(); }
DEVICE int block_y() { return blockIdx.y; }
DEVICE int block_z() { return blockIdx.z; }
DEVICE int blocks_x() { return gridDim.x; }

DEVICE u32 address_of(const void* shared) { return (u32)__cvta_generic_to_shared(shared); }
DEVICE float bits_float(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 float_bits(float x) { return __float_as_uint(x); }

// Two bf16 in a word, the first in its low half.
DEVICE u32 pack(float first, float second) {
  u32 word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
}
DEVICE float first_of(u32 word) { return bits_float(word << 16); }
DEVICE float second_of(u32 word) { return bits_float(word & 0xffff0000u); }

// Halves of two words side by side, that of the first one below.
DEVICE u32 low_halves(u32 x, u32 y) { return __byte_perm(x, y, 0x5410); }
DEVICE u32 high_halves(u32 x, u32 y) { return __byte_perm(x, y, 0x7632); }

DEVICE float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float rsqrt_of(float x) { return rsqrtf(x); }
DEVICE float max_of(float a, float b) { return fmaxf(a, b); }
DEVICE int smaller(int a, int b) { return a < b ? a : b; }
DEVICE int larger(int a, int b) { return a > b ? a : b; }

DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE float shuffle(float x, int source) { return __shfl_sync(0xffffffffu, x, source); }
DEVICE bool all_lanes(bool x) { return __all_sync(0xffffffffu, x); }
DEVICE void sync_lanes() { __syncwarp(); }

// All threads of the block, or `threads` of them that name the same barrier (1 to 15).
DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_some(int barrier, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }

// All threads of a cluster that have not ended: the first half of a meeting, and the second; `only` shows nothing of what was
// written before.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_arrive_only() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// The same place in the shared memory of another block of the cluster, as `push` and `push16` want it.
template <class T> DEVICE T* beside(T* shared, int rank) {
  u32 place;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(place) : "r"(address_of(shared)), "r"(rank));
  return (T*)(u64)place;
}

// What nobody writes while the kernel runs, and what is read once.
DEVICE uint4 load(const uint4* from) {
  uint4 x;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
  return x;
}
// What another block may write meanwhile: from the L2, always.
DEVICE u32 load_now(const u32* from) {
  u32 x;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}
DEVICE uint2 load_now(const uint2* from) {
  uint2 x;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(from) : "memory");
  return x;
}
DEVICE uint4 load_now(const uint4* from) {
  uint4 x;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from) : "memory");
  return x;
}
DEVICE void store_now(u32* to, u32 x) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory"); }
DEVICE void store_now(uint2* to, uint2 x) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(x.x), "r"(x.y) : "memory");
}
DEVICE void store_now(uint4* to, uint4 x) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};"
               ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
// What another GPU may write meanwhile, and what it reads: 16 bytes, of which each half is there as a whole.
DEVICE uint4 load_far(const uint4* from) {
  uint4 x;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from) : "memory");
  return x;
}
DEVICE void store_far(uint4* to, uint4 x) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
// Between two readings of what is not there yet.
DEVICE void rest() {}

// c (16 x 8, fp32) += a (16 x 16) b (16 x 8), bf16; with g = lane / 4 and t = lane % 4 the words are
// a: (g, 2t) (g + 8, 2t) (g, 2t + 8) (g + 8, 2t + 8), b: (2t, g) (2t + 8, g), c: (g, 2t) (g, 2t + 1) (g + 8, ...).
DEVICE void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// The same product alone, which overwrites c.
DEVICE void mma_new(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.f));
}
// x y + z of two bf16 each, rounded once.
DEVICE u32 fma_pair(u32 x, u32 y, u32 z) {
  u32 word;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(word) : "r"(x), "r"(y), "r"(z));
  return word;
}
DEVICE float half_of(u16 bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
// Four 8 x 8 matrices of 2 bytes: lane 8 i + j has the address of row j of matrix i; `turned` gives the transposes.
DEVICE void load_matrices(u32* out, const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(address_of(shared)) : "memory");
}
DEVICE void load_matrices_turned(u32* out, const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(address_of(shared)) : "memory");
}
// The transpose of an 8 x 8 matrix whose lane 4 i + j has (i, 2j) and (i, 2j + 1).
DEVICE u32 transpose(u32 word) {
  u32 turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(word));
  return turned;
}

// 16 bytes to shared memory behind the thread's back, zeros where not `valid`.
DEVICE void copy16(void* shared, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address_of(shared)), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

// A barrier in shared memory that also counts bytes; its parity turns each time all have arrived.
DEVICE void bar_init(u64* bar, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address_of(bar)), "r"(arrivals) : "memory");
}
DEVICE void bars_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void bar_arrive(u64* bar) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(address_of(bar)) : "memory");
}
DEVICE void bar_expect(u64* bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address_of(bar)), "r"(bytes) : "memory");
}
DEVICE void bar_wait(u64* bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@done bra.uni out;\n"
      "bra.uni again;\nout:\n}" ::"r"(address_of(bar)), "r"(parity) : "memory");
}
// The copy engine: bytes (a multiple of 16) that are read once; `bar` hears of them.
DEVICE void bulk_copy(void* shared, const void* from, u32 bytes, u64* bar) {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
               ::"r"(address_of(shared)), "l"(from), "r"(bytes), "r"(address_of(bar)), "l"(policy) : "memory");
}
// As `load`, but where it stands: a compiler may not move it behind what it is to be early for.
DEVICE uint4 load_early(const uint4* from) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
  return x;
}
// Registers that four warps, which all come here, have from now on (a multiple of 8).
template <int COUNT> DEVICE void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> DEVICE void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
// To the L2, without waiting for it; bytes is a multiple of 16.
DEVICE void prefetch(const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
// A word of shared memory that another warp writes meanwhile, now and then, so that who waits is in nobody's way.
DEVICE int watch(const int* shared) {
  __nanosleep(100);
  return *(const volatile int*)shared;
}
// 16 bytes to `beside`, whose barrier there hears of them.
DEVICE void push16(void* there, uint4 x, u64* bar) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
               ::"r"((u32)(u64)there), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"((u32)(u64)bar) : "memory");
}

// In a chain (`chain.py`): the next kernel's blocks may come onto the GPU, where there is room; and everything that the
// kernels before this one have written is there from now on. Before Hopper it is there at once.
#if __CUDA_ARCH__ >= 900
DEVICE void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void await_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#else
DEVICE void let_next_begin() {}
DEVICE void await_previous() {}
#endif

// Products of four warps by the tensor cores' own reading of shared memory: rows of 128 bytes, 16-byte pieces of which stand
// at piece ^ row % 8, from addresses that are multiples of 1,024.
DEVICE void shared_ready() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
DEVICE void products_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
DEVICE u64 described(const u8* rows, int step) {
  return (u64)((address_of(rows) + step * 32) >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
// c (64 x N, fp32) += a (64 x 16) b^T (b: N x 16), bf16, of the 16 columns from 16 `step` on; thread i of the four warps has, with
// r = 16 (i / 32) + i % 32 / 4 and n = 2 (i % 4), c[4 j]: (r, 8 j + n) (r, 8 j + n + 1) (r + 8, 8 j + n) (r + 8, ...).
#define SUMS(c, i) \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
DEVICE void product_64(float (&c)[16], const u8* a, const u8* b, int step) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15}, %16, %17, 1, 1, 1, 0, 0;"
      : SUMS(c, 0), SUMS(c, 8)
      : "l"(described(a, step)), "l"(described(b, step)));
}
DEVICE void product_64(float (&c)[24], const u8* a, const u8* b, int step) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, %24, %25, 1, 1, 1, 0, 0;"
      : SUMS(c, 0), SUMS(c, 8), SUMS(c, 16)
      : "l"(described(a, step)), "l"(described(b, step)));
}
DEVICE void product_64(float (&c)[32], const u8* a, const u8* b, int step) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, 1, "
      "1, 1, 0, 0;"
      : SUMS(c, 0), SUMS(c, 8), SUMS(c, 16), SUMS(c, 24)
      : "l"(described(a, step)), "l"(described(b, step)));
}
DEVICE void product_64(float (&c)[48], const u8* a, const u8* b, int step) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, "
      "%35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, %48, %49, 1, 1, 1, 0, 0;"
      : SUMS(c, 0), SUMS(c, 8), SUMS(c, 16), SUMS(c, 24), SUMS(c, 32), SUMS(c, 40)
      : "l"(described(a, step)), "l"(described(b, step)));
}

// The copy engine, of what many blocks read.
DEVICE void bulk_copy_kept(void* shared, const void* from, u32 bytes, u64* bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(address_of(shared)), "l"(from), "r"(bytes), "r"(address_of(bar)) : "memory");
}
// The copy engine, to the shared memory of another block of the cluster, whose `bar` hears of it.
DEVICE void push(void* there, const void* shared, u32 bytes, u64* bar) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"((u32)(u64)there), "r"(address_of(shared)), "r"(bytes), "r"((u32)(u64)bar) : "memory");
}

// Two e4m3 codes (float8_e4m3fn) of the nearest numbers, the first in the low byte; what is beyond 448 stops there. From
// capability 8.9 on.
DEVICE u16 pack_e4m3(float first, float second) {
  u16 codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
  return codes;
}
// Two bf16 of the codes in bytes 1 and 3 times factors, which are scales times 2^120: an e4m3 number, smallest ones too, is the
// bf16 with the same bits of exponent and mantissa times 2^120. A product is rounded once.
DEVICE u32 e4m3_high(u32 codes, u32 factors) {
  const u32 bits = (codes >> 4 & 0x07f007f0u) | (codes & 0x80008000u);
  u32 word;
  // A product of bf16 before Hopper is a sum with -0, too.
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(word) : "r"(bits), "r"(factors), "r"(0x80008000u));
  return word;
}
