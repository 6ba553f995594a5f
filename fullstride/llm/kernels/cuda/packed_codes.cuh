// Packed matrices in tiles of 16 outputs and 128 inputs (`fullstride/llm/packed/formats.py`): their codes as the words of
// tensor cores' fragments, exactly, and the scales of their groups.

enum { SCALE, SCALE_MINIMUM, SCALE_ZERO, ROW_SCALE, K4, K6 };

constexpr int STEP = 128, CODE_BYTES = 16 * STEP * BITS / 8;
// Inputs that share a scale, as far as sums go: of larger groups the parts have the same one.
constexpr int SIZE = KIND == K6 ? 16 : 32, GROUPS = STEP / SIZE, OWN = GROUPS / 4, BLOCKS = BLOCK ? IN / BLOCK : 1;
constexpr int WORDS = BITS == 8 ? 8 : BITS == 6 ? 6 : 4;
// Of a tile's step.
constexpr int RECORD_BYTES = 16 * RECORD * (BLOCK && BLOCK < STEP ? STEP / BLOCK : 1);
// A number of 7 bits in the mantissa of the bf16 128 is that number and 128.
constexpr u32 BASE = 0x43004300u, MINUS_ONE = 0xbf80bf80u, ZEROS = BASE | ZERO * 0x00010001u;

// Codes of 64 inputs of a tile, of which each lane has its fragments'.
DEVICE void read_codes(u32* words, const u8* codes, int half) {
  if (BITS == 8) {
    *(uint4*)words = *(const uint4*)(codes + 2 * half * 512 + lane() * 16);
    *(uint4*)(words + 4) = *(const uint4*)(codes + (2 * half + 1) * 512 + lane() * 16);
  } else {
    *(uint4*)words = *(const uint4*)(codes + half * 512 + lane() * 16);
  }
  if (BITS == 6) *(uint2*)(words + 4) = *(const uint2*)(codes + 1024 + lane() * 16 + half * 8);
}

// Word i of the fragment of inputs 16 k to 16 k + 15 of those 64; codes with minima are 128 more.
DEVICE u32 fragment(const u32* words, int k, int i) {
  if (BITS == 8) {
    const u32 word = words[2 * k + i / 2];
    if (KIND == ROW_SCALE) {
      const u32 codes = i % 2 ? word : word << 8;
      // As `e4m3_high`, but with what GPUs before Hopper have.
      return fma_pair((codes >> 4 & 0x07f007f0u) | (codes & 0x80008000u), 0x7b807b80u, 0x80008000u);
    }
    // From -128 on: what the highest bit does not say is 128 less.
    const u32 codes = word >> 8 * (i % 2);
    return fma_pair((codes & 0x00800080u) ^ 0x43804380u, MINUS_ONE, (codes & 0x007f007fu) | BASE);
  }
  u32 codes = (words[k] >> 4 * i & 0x000f000fu) | BASE;
  if (BITS == 6) {
    const int shift = 2 * (4 * (k % 2) + i) - 4;
    const u32 high = words[4 + k / 2];
    codes |= (shift < 0 ? high << -shift : high >> shift) & 0x00300030u;
  }
  return MINIMA ? codes : fma_pair(ZEROS, MINUS_ONE, codes);
}

// Where the records of a step begin among a tile's: those of one block for all outputs, or of several blocks side by side.
DEVICE int records_at(int step) { return (BLOCK ? step * STEP / BLOCK : 0) * 16 * RECORD; }

// Scale and minimum of a group of a step's and an output, from the records of the step; the minimum makes up for the 128.
DEVICE float2 scale_of(const u8* records, int output, int step, int group) {
  const u8* from = records + ((BLOCK && BLOCK < STEP ? group * SIZE / BLOCK : 0) * 16 + output) * RECORD;
  if (KIND == ROW_SCALE) return float2{*(const float*)from, 0};
  const int all = step * GROUPS + group;
  if (KIND == K6) return float2{half_of(*(const u16*)(from + 16)) * (float)(signed char)from[all % 16], 0};
  if (KIND == SCALE) return float2{half_of(*(const u16*)from), 0};
  const u32 word = *(const u32*)from;
  const float scale = half_of(word & 0xffff), second = half_of(word >> 16);
  if (KIND == SCALE_ZERO) return float2{scale, -scale * (second + 128)};
  if (KIND == SCALE_MINIMUM) return float2{scale, second - 128 * scale};
  const uint4 words = *(const uint4*)from;
  const int i = all % 8;
  const u32 six = (words.y >> 4 * i & 15) | (words.w >> 2 * i & 3) << 4;
  const u32 minimum = (words.z >> 4 * i & 15) | (words.w >> 16 + 2 * i & 3) << 4;
  const float own = scale * (float)six;
  return float2{own, -second * (float)minimum - 128 * own};
}
