// fwd_bf16_d128_causal_m128n128_reusev_pm64_smemtotals: fused attention forward for Hopper
// (sm_90a). Rendered by fagen; do not edit.
//
//   out = softmax(scale * q kᵀ) v,   lse = log(sum(exp(scale * q kᵀ)))
//
// One thread block computes a tile of 128 query rows of one head, 128 keys at a time from the last
// to the first, by online softmax in base 2. One producer warp copies Q, K and V into shared memory
// by TMA; 2 consumer warpgroups of 64 rows each multiply by WGMMA. They do so in ping-pong: they
// take turns at the tensor cores.
//
// Needs fagen_host.h, which lies beside it, the headers below, and
// -gencode=arch=compute_90a,code=sm_90a.

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90_desc.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

namespace fagen_fwd_bf16_d128_causal_m128n128_reusev_pm64_smemtotals_kernel {

// ---- The schedule ----------------------------------------------------------------------------

using Element = __nv_bfloat16;
constexpr int kHeadDim = 128;
constexpr int kHeadDimV = 128;
constexpr int kHeadDimPadded = 128;  // in shared memory, padded with zeros
constexpr int kHeadDimVPadded = 128;
constexpr int kBlockM = 128;
constexpr int kBlockN = 128;
constexpr int kStages = 2;  // K and V buffers
constexpr int kQStages = 1;
constexpr int kConsumers = 2;  // warpgroups of 64 query rows
constexpr int kThreads = 384;
constexpr int kLaunchRegisters = 168;
constexpr int kStepK = 16;   // the K of every wgmma
constexpr int kQkSlab = 64;  // columns of a slab: one swizzle span, all rows of a slab together
constexpr auto kQkDescriptor = cute::SM90::GMMA::LayoutType::B128;

constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;

constexpr int64_t kL2Share = 26214400;  // bytes of the L2 cache for K and V

constexpr int kSectionRounds = 2;  // tiles for each SM in the last section of heads

constexpr int kTileStages = 2;   // tiles drawn and not yet done
constexpr int kTileReaders = 8;  // warps that ask for them
// Blocks before its end that a tile's successor is drawn: enough to hide the answer's way.
constexpr int kDrawAhead = 2;

constexpr int kUnrolledCopies = 8;  // that a thread issues without a loop

constexpr int kVSlab = 64;
constexpr auto kVDescriptor = cute::SM90::GMMA::LayoutType::B128;

constexpr float kNoScore = -1e+30f;  // where row maxima start: finite, so that no exponent is NaN
constexpr float kFar =
    16777216.0f;  // exponents of 2 from here on are too coarse to be taken as they are

constexpr float kMaxPartialSum = 4096.0f;  // of a lane's P; more updates the maximum

// After a tile's first that find their maxima before P, if scores are widely spread.
constexpr int kSpreadBlocks = 4;
constexpr float kSpreadSum =
    1.25f;  // of a thread's P in its two rows: in so many threads of a warp less
constexpr int kSpreadKeys = 16;  // with fewer in its rows a warp's small sums tell nothing
constexpr int kSpreadThreads = 20;
constexpr int kSpreadWarps = 3;   // of a warpgroup, at least
constexpr int kSpreadSeeing = 2;  // warps of it that see so many keys, at least

constexpr int kOutputColumns = 128;

constexpr int kPromote = 64;  // blocks after which O moves to another accumulator

using OutElement = __nv_bfloat16;
constexpr int kOSlab = 64;
constexpr int kOSwizzleBits = 3;

constexpr int kWarpgroup = 128;
constexpr int kWarpgroupRows = 64;  // the M of every wgmma

using Output = float[kOutputColumns / 2];  // a thread's part of a warpgroup's O

using Barrier = cutlass::arch::ClusterBarrier;
using TransactionBarrier = cutlass::arch::ClusterTransactionBarrier;

template <class Integer>
__host__ __device__ constexpr Integer ceil_div(Integer a, Integer b) {
  return (a + b - 1) / b;
}

// n / value for 0 <= n < 2^31 by a multiplication: every thread waits for its coordinates.
// With 2^(bits - 1) < value <= 2^bits, rounding 2^(31 + bits) / value up is exact enough (Granlund
// and Montgomery, "Division by Invariant Integers using Multiplication", 1994).
struct FastDivisor {
  int value;
  uint32_t multiplier;  // 0: value is 1
  int shift;

  __host__ explicit FastDivisor(int divisor = 1) : value(divisor), multiplier(0), shift(0) {
    if (divisor > 1) {
      while ((int64_t(2) << shift) < divisor) {
        ++shift;
      }
      multiplier = uint32_t(((uint64_t(1) << (32 + shift)) + divisor - 1) / divisor);
    }
  }

  __device__ __forceinline__ int divide(int n) const {
    return multiplier ? int(__umulhi(n, multiplier) >> shift) : n;
  }
};

// Blocks first … last - 1 of kBlockN keys, visited from the last to the first.
struct Blocks {
  int first;
  int full_last;  // from here on some row does not see all keys
  int last;
};

// kBlockM query rows of one head, and the keys they see.
struct alignas(16) Tile {
  int first_row, head, kv_head, batch;
  Blocks blocks;  // last < first: no tile
};

struct SharedStorage {
  alignas(1024) Element q[kQStages][kBlockM * kHeadDimPadded];
  alignas(1024) Element k[kStages][kBlockN * kHeadDimPadded];
  union {  // O is stored through V's space, once the last V of a tile has been read
    alignas(1024) Element v[kStages][kBlockN * kHeadDimVPadded];
    alignas(1024) OutElement o[kBlockM * kHeadDimVPadded];
  };
  alignas(1024) float4
      totals[kConsumers][kHeadDimVPadded / 8][kWarpgroup];  // 4 elements of a thread at a time
  alignas(1024) TransactionBarrier q_full[kQStages][kConsumers];
  uint8_t votes[kConsumers][4];  // of warps
  TransactionBarrier k_full[kStages];
  TransactionBarrier v_full[kStages];
  Barrier q_empty[kQStages][kConsumers];
  Barrier k_empty[kStages];
  Barrier v_empty[kStages];
  Barrier o_empty;
  Barrier tile_full[kTileStages];
  Barrier tile_empty[kTileStages];
  Tile tiles[kTileStages];  // in work, and next
};
constexpr int kSharedBytes = sizeof(SharedStorage);
static_assert(kSharedBytes <= 230400, "the layout outgrew the plan's ledger");

struct Params {
  CUtensorMap q, k, v, out;
  float* lse;  // may be null
  int64_t lse_stride_batch, lse_stride_head;
  FastDivisor heads, heads_per_kv_head;
  int seqlen_q, seqlen_k;
  int m_blocks;          // tiles of one head
  int slots;             // of tiles, over all heads and batches
  bool has_empty_tiles;  // whose rows see no key
  int sections;
  FastDivisor section_slots;
  FastDivisor section_heads;  // heads of any batch whose K and V share the L2 cache
  FastDivisor last_section_heads;
  int m_end;
  int tiles;              // of all tiles; slots are for those that see a key
  uint32_t* tiles_drawn;  // beyond the first of each block
  float scale_log2;       // scale * log2(e)
};

// ---- Tiles -----------------------------------------------------------------------------------

__device__ __forceinline__ int lane() {
  return threadIdx.x % 32;
}

// A stage of a ring of buffers, and the phase of its barriers, which flips each time around.
template <int stages>
struct RingPosition {
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    stage += 1;
    if (stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Hardware barriers, by number; 0 is __syncthreads.
constexpr int kStore = 1;  // and up: each of one warpgroup

using Lengths = Params;  // seqlen_q and seqlen_k: all sequences have the same

// The keys first … last - 1 that a row sees; none where last <= first. Both ends rise from row to
// row.
struct Keys {
  int first, last;
};

__host__ __device__ __forceinline__ Keys seen_by(const Lengths& lengths, int row) {
  const int seqlen_q = lengths.seqlen_q, seqlen_k = lengths.seqlen_k;
  return {0, min(seqlen_k, row + seqlen_k - seqlen_q + 1)};
}

// What the rows first_row … last_row see.
__host__ __device__ __forceinline__ Blocks blocks_of(const Lengths& lengths, int first_row,
                                                     int last_row) {
  const Keys top = seen_by(lengths, first_row), bottom = seen_by(lengths, last_row);
  return {0, max(0, top.last) / kBlockN, ceil_div(max(0, bottom.last), kBlockN)};
}

__device__ __forceinline__ Blocks blocks_of_tile(const Lengths& lengths, int m_block) {
  return blocks_of(lengths, m_block * kBlockM, m_block * kBlockM + kBlockM - 1);
}

__device__ __forceinline__ Tile tile_of(const Params& params, int flat_head, int m_block) {
  Tile tile;
  tile.first_row = m_block * kBlockM;
  tile.batch = params.heads.divide(flat_head);
  tile.head = flat_head - tile.batch * params.heads.value;
  tile.kv_head = params.heads_per_kv_head.divide(tile.head);
  tile.blocks = blocks_of_tile(params, m_block);
  return tile;
}

__device__ __forceinline__ Tile tile_at(const Params& params, int index) {
  // Longest tiles of a section first, so that short ones fill its end.
  const int section = min(params.section_slots.divide(index), params.sections - 1);
  const int rank = index - section * params.section_slots.value;
  const FastDivisor& heads =
      section + 1 < params.sections ? params.section_heads : params.last_section_heads;
  const int row = heads.divide(rank);
  const int m_block = params.m_end - 1 - row;
  const int flat_head = section * params.section_heads.value + rank - row * heads.value;
  return tile_of(params, flat_head, m_block);
}

// The tiles that the producer draws, for one warp.
struct Tiles {
  SharedStorage& shared;
  uint32_t taken = 0;  // so far

  // The next tile that sees a key; false at the end.
  __device__ __forceinline__ bool next(const Params&, Tile& tile) {
    const uint32_t stage = taken % kTileStages, phase = taken / kTileStages % 2;
    shared.tile_full[stage].wait(phase);
    tile = shared.tiles[stage];
    __syncwarp();  // one lane arrives for all
    if (lane() == 0) {
      shared.tile_empty[stage].arrive();
    }
    ++taken;
    return tile.blocks.last > tile.blocks.first;
  }
};

// Who takes tiles: thread blocks.
__device__ __forceinline__ int taker() {
  return blockIdx.x;
}
__device__ __forceinline__ int takers() {
  return gridDim.x;
}

// Tiles that see no key, which are nobody's work but for their zeros.
struct EmptyTiles {
  int index = taker();

  __device__ __forceinline__ explicit EmptyTiles(const Tiles&) {}

  __device__ __forceinline__ bool next(const Params& params, Tile& tile) {
    if (!params.has_empty_tiles) {
      return false;
    }
    while (index < params.tiles) {
      tile = tile_of(params, index / params.m_blocks, index % params.m_blocks);
      index += takers();
      if (tile.blocks.last == tile.blocks.first) {
        return true;
      }
    }
    return false;
  }
};

// A warp has 16 of an accumulator's 64 rows, from warp_row() on.
__device__ __forceinline__ int warp_row() {
  return threadIdx.x % kWarpgroup / 32 * 16;
}

// A thread has two of them, thread_row() and eight below: element i is in row i / 2 % 2 and in
// column i / 4 * 8 + i % 2, counted from 2 * (lane % 4). Four lanes share a row.
__device__ __forceinline__ int thread_row() {
  return warp_row() + lane() / 4;
}

// Which of a thread's two rows element i is in, and which column, counted as above.
__device__ constexpr int row_of(int i) {
  return i / 2 % 2;
}
__device__ constexpr int column_of(int i) {
  return i / 4 * 8 + i % 2;
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

// The largest of a thread's n scores in its two rows: two chains a row, r and r + 2, to hide
// latency.
template <int n>
__device__ __forceinline__ void find_largest(const float* s, float (&chains)[4]) {
#pragma unroll
  for (int chain = 0; chain < 4; ++chain) {
    chains[chain] = s[2 * chain];
  }
#pragma unroll
  for (int i = 0; i < n; i += 2) {
    const int chain = row_of(i) + i / 4 % 2 * 2;
    chains[chain] = fmaxf(chains[chain], fmaxf(s[i], s[i + 1]));
  }
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// What a thread adds up of P in its two rows: two chains a row, to hide latency.
using Chains = float[4];

__device__ __forceinline__ void add_to(Chains& chains, int i, float p, bool first) {
  const int chain = row_of(i) + i % 2 * 2;
  chains[chain] = first && i < 4 ? p : chains[chain] + p;
}

__device__ __forceinline__ float sum_of(const Chains& chains, int row) {
  return chains[row] + chains[row + 2];
}

// P of n scores with the same factor, relative to their rows' offsets; its sums begin with the
// first scores.
template <int n>
__device__ __forceinline__ void exponentiate_group(const float* s, float* p, float factor,
                                                   const float (&offset)[2], Chains& chains,
                                                   bool first) {
#pragma unroll
  for (int i = 0; i < n; ++i) {
    p[i] = exp2_approx(fmaf(s[i], factor, offset[row_of(i)]));
    add_to(chains, i, p[i], first);
  }
}

// What a thread keeps of its two rows, and how their scores become P.
struct Softmax {
  float scale = 0.f;                    // from scores to exponents of 2
  float max[2] = {kNoScore, kNoScore};  // of the scores
  float sum[2] = {0.f, 0.f};            // of this thread's part of P
  float rescale[2] = {1.f, 1.f};        // of O, from the last reference to this one
  bool raised = false;                  // whether there is any
  bool far = false;                     // see move_far

  // What a row's exponents are relative to. It is rounded here and nowhere else: P, its sum and the
  // log-sum-exp of a row share that rounding, and it cancels out.
  __device__ __forceinline__ float reference(int r) const { return __fmul_rn(max[r], scale); }

  // What is added to a row's scaled scores, which are relative to its maximum already where that is
  // far.
  __device__ __forceinline__ float offset_of(int r) const { return far ? 0.f : -reference(r); }

  // The row maxima with a block of scores.
  __device__ __forceinline__ void find_top(const float (&s)[kBlockN / 2], float (&top)[2]) const {
    float chains[4];
    find_largest<kBlockN / 2>(s, chains);
    top[0] = fmaxf(max[0], fmaxf(chains[0], chains[2]));
    top[1] = fmaxf(max[1], fmaxf(chains[1], chains[3]));
  }

  __device__ __forceinline__ bool is_far(int r) const {
    return fabsf(reference(r)) >= kFar && max[r] > kNoScore;
  }

  // Of scores this large fp32 rounds the exponents to whole numbers, or worse. So from here to the
  // end of the tile the row maxima are subtracted before scores are scaled, which is exact, and
  // each block finds its own.
  __device__ __forceinline__ void move_far(float (&s)[kBlockN / 2], const float (&before)[2],
                                           const float (&old)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float rise = far ? (before[r] - max[r]) * scale : __fmaf_rn(-max[r], scale, old[r]);
      rescale[r] = before[r] == kNoScore ? 0.f : exp2_approx(rise);
    }
#pragma unroll
    for (int i = 0; i < kBlockN / 2; ++i) {
      s[i] -= max[row_of(i)];
    }
    far = true;
  }

  // Updates the row maxima by a block of scores, and rescales what is relative to them.
  __device__ __forceinline__ void update_row_max(float (&s)[kBlockN / 2]) {
    float top[2];
    find_top(s, top);
    const float before[2] = {max[0], max[1]};
    const float old[2] = {reference(0), reference(1)};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      max[r] = quad_max(top[r]);
      rescale[r] = exp2_approx(old[r] - reference(r));
    }
    if (far || is_far(0) || is_far(1)) {
      move_far(s, before, old);
    }
    sum[0] *= rescale[0];
    sum[1] *= rescale[1];
  }

  // P of a block of scores, with these offsets, and its row sums. Returns whether these are so
  // small that P fits.
  __device__ __forceinline__ bool exponentiate(const float (&s)[kBlockN / 2],
                                               float (&p)[kBlockN / 2], float (&part)[2],
                                               const float (&offset)[2]) const {
    Chains chains;
    exponentiate_group<kBlockN / 2>(s, p, scale, offset, chains, true);
    part[0] = sum_of(chains, 0);
    part[1] = sum_of(chains, 1);
    return part[0] <= kMaxPartialSum && part[1] <= kMaxPartialSum;
  }

  // P of a block of scores, in place, relative to the row maxima; its row sums are added up.
  __device__ __forceinline__ void exponentiate(float (&s)[kBlockN / 2]) {
    const float offset[2] = {offset_of(0), offset_of(1)};
    float part[2];
    exponentiate(s, s, part, offset);
    sum[0] += part[0];
    sum[1] += part[1];
  }

  // P of a block of scores, relative to the row maxima so far; part: its row sums. Returns whether
  // this thread's P fits, which small sums prove.
  __device__ __forceinline__ bool guess(const float (&s)[kBlockN / 2], float (&p)[kBlockN / 2],
                                        float (&part)[2]) const {
    const float offset[2] = {-reference(0), -reference(1)};
    return exponentiate(s, p, part, offset) && !far;
  }

  // Whether the scores of the first block are so widely spread, in most rows of the warp, that of
  // its keys the largest alone counts: then later blocks are likely to outgrow it.
  __device__ __forceinline__ bool spread() const {
    return __popc(__ballot_sync(0xffffffff, sum[0] + sum[1] < kSpreadSum)) > kSpreadThreads;
  }

  // The tensor cores cut sums off instead of rounding them. So every kPromote blocks O is added to
  // an fp32 total and starts at zero; the total is rescaled only then, by the product of all
  // factors since.
  bool begun = false;  // whether there is a total yet
  float missed[2] = {1.f, 1.f};

  int blocks = 0;  // in O
};

// wgmma is asynchronous: an empty asm statement on each operand register keeps the compiler from
// moving other uses of it past this point.
template <class T, int n>
__device__ __forceinline__ void fence_operand(T (&registers)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) {
    if constexpr (sizeof(T) == sizeof(float) && !std::is_integral_v<T>) {
      asm volatile("" : "+f"(registers[i])::"memory");
    } else {
      asm volatile("" : "+r"(registers[i])::"memory");
    }
  }
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// A matrix descriptor: an operand's address and the offsets between its core matrices. Addresses in
// units of 16 bytes never carry out of their 14 bits, so that only the low word changes.
struct Descriptor {
  uint32_t low, high;

  __device__ __forceinline__ Descriptor operator+(uint32_t offset) const {
    return {low + offset, high};
  }
  __device__ __forceinline__ uint64_t bits() const { return uint64_t(high) << 32 | low; }
};

// leading_byte_offset: from slab to slab, for slabs along M or N; otherwise unused.
template <int slab>
__device__ __forceinline__ Descriptor descriptor(const Element* tile,
                                                 cute::SM90::GMMA::LayoutType layout,
                                                 uint32_t leading_byte_offset = 16) {
  constexpr uint32_t stride_byte_offset = 8 * slab * sizeof(Element);
  const uint32_t start = cute::cast_smem_ptr_to_uint(tile) % (1 << 18);  // in its own block
  return {start >> 4 | leading_byte_offset >> 4 << 16, stride_byte_offset >> 4 | uint32_t(layout)
                                                                                     << 30};
}

// From a descriptor to that of the k-th column of a tile of `rows` rows.
template <int rows, int slab>
__device__ constexpr uint32_t column_offset(int k) {
  return (k / slab * rows * slab + k % slab) * sizeof(Element) >> 4;
}

// S = or += Q Kᵀ, kStepK columns of each, both from shared memory.
template <bool accumulate>
__device__ __forceinline__ void wgmma_qk(float (&c)[64], Descriptor a, Descriptor b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{ %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63 }, "
      "%64, %65, %66, 1, 1, 0, 0;"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]),
        "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]),
        "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]),
        "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]),
        "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]),
        "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]),
        "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]),
        "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]),
        "+f"(c[63])
      : "l"(a.bits()), "l"(b.bits()), "n"(accumulate ? 1 : 0));
}

// kOutputColumns columns of O = or += P V, kStepK keys of each, P from registers.
template <bool accumulate>
__device__ __forceinline__ void wgmma_pv(float (&c)[64], const uint32_t* a, Descriptor b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{ %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63 }, "
      "{ %64, %65, %66, %67 }, %68, %69, 1, 1, 1;"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]),
        "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]),
        "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]),
        "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]),
        "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]),
        "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]),
        "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]),
        "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]),
        "+f"(c[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()), "n"(accumulate ? 1 : 0));
}

__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

constexpr int kScheduler = kStore + kConsumers;  // and up: the turn of each

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

using OutPair = __nv_bfloat162;

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const OutPair pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Byte offset of an element in a slab, swizzled as TMA and wgmma do: bits 4… are xored with bits
// 7….
template <int slab, int swizzle_bits>
__device__ __forceinline__ int swizzled(int row, int column) {
  const int offset = (row * slab + column) * sizeof(OutElement);
  return offset ^ (offset >> 3 & ((1 << swizzle_bits) - 1) << 4);
}

// Stores four 8x8 matrices of 16-bit elements, a 16x16 block of an accumulator, at `address`, which
// each lane gives for row lane % 16 and column lane / 16 * 8.
__device__ __forceinline__ void store_matrices(void* address, uint32_t a, uint32_t b, uint32_t c,
                                               uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], { %1, %2, %3, %4 };" ::"r"(
                   cute::cast_smem_ptr_to_uint(address)),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// Rounds a warp's 16 rows of an accumulator, element(i), to OutElement and writes them to slabs of
// 64 rows. Returns whether all of this thread's numbers are finite: then 0 times them is 0.
template <int columns, int slab, int swizzle_bits, class Elements>
__device__ __forceinline__ bool store_accumulator(OutElement* tile, Elements element) {
  const int row = warp_row() + lane() % 16;
  const OutPair zero = {};
  OutPair sum = zero;
#pragma unroll
  for (int column = 0; column < columns; column += 16) {
    char* base = reinterpret_cast<char*>(tile + column / slab * kWarpgroupRows * slab);
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] = pack(element(column / 2 + 2 * i), element(column / 2 + 2 * i + 1));
      sum = __hfma2(reinterpret_cast<const OutPair&>(pairs[i]), zero, sum);
    }
    store_matrices(base + swizzled<slab, swizzle_bits>(row, column % slab + lane() / 16 * 8),
                   pairs[0], pairs[1], pairs[2], pairs[3]);
  }
  return __hbeq2(sum, zero);
}

constexpr int kAllConsumers = kStore + 2 * kConsumers;

// ---- Loading ---------------------------------------------------------------------------------

// Copies tiles from global to shared memory. Used by a single thread.
struct Loader {
  const Params& params;
  SharedStorage& shared;
  RingPosition<kStages> k, v;

  // Which sequence a tile is of, to TMA.
  __device__ __forceinline__ static int of_q(const Tile& tile) { return tile.batch; }
  __device__ __forceinline__ static int of_k(const Tile& tile) { return tile.batch; }

  // One box per slab; rows past the sequence and columns past the head dim are filled with zeros.
  template <int columns, int rows, int slab>
  __device__ __forceinline__ void copy(const CUtensorMap& map, TransactionBarrier& full,
                                       Element* tile, int row, int head, int batch,
                                       cute::TMA::CacheHintSm90 hint) {
    full.arrive_and_expect_tx(rows * columns * sizeof(Element));
#pragma unroll kUnrolledCopies
    for (int column = 0; column < columns; column += slab) {
      cute::SM90_TMA_LOAD_4D::copy(&map, reinterpret_cast<uint64_t*>(&full),
                                   static_cast<uint64_t>(hint), tile + column * rows, column, row,
                                   head, batch);
    }
  }

  uint32_t tiles = 0;  // whose Q was loaded

  __device__ __forceinline__ void load_q(const Tile& tile) {
    const uint32_t stage = tiles % kQStages, phase = tiles / kQStages % 2;
    // Each warpgroup's rows as soon as it has read its last ones.
#pragma unroll kUnrolledCopies
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      shared.q_empty[stage][consumer].wait(phase ^ 1);
      copy<kHeadDimPadded, kWarpgroupRows, kQkSlab>(
          params.q, shared.q_full[stage][consumer],
          shared.q[stage] + consumer * kWarpgroupRows * kHeadDimPadded,
          tile.first_row + consumer * kWarpgroupRows, tile.head, of_q(tile),
          cute::TMA::CacheHintSm90::EVICT_FIRST);
    }
    ++tiles;
  }

  __device__ __forceinline__ void load_k(const Tile& tile, int block) {
    shared.k_empty[k.stage].wait(k.phase ^ 1);
    copy<kHeadDimPadded, kBlockN, kQkSlab>(params.k, shared.k_full[k.stage], shared.k[k.stage],
                                           block * kBlockN, tile.kv_head, of_k(tile),
                                           cute::TMA::CacheHintSm90::EVICT_LAST);
    k.advance();
  }

  __device__ __forceinline__ void load_v(const Tile& tile, int block) {
    shared.v_empty[v.stage].wait(v.phase ^ 1);
    copy<kHeadDimVPadded, kBlockN, kVSlab>(params.v, shared.v_full[v.stage], shared.v[v.stage],
                                           block * kBlockN, tile.kv_head, of_k(tile),
                                           cute::TMA::CacheHintSm90::EVICT_LAST);
    v.advance();
  }

  uint32_t o_phase = 0;

  // The previous tile's O must have been stored from V's space, in all thread blocks that this one
  // loads V for.
  __device__ __forceinline__ void wait_for_output() {
    shared.o_empty.wait(o_phase ^ 1);
    o_phase ^= 1;
  }
};

// Draws tiles and passes them on. Used by the producer.
struct TileScheduler {
  const Params& params;
  SharedStorage& shared;
  int drawn = blockIdx.x - gridDim.x;  // beyond the first tile of each block, which nobody draws
  uint32_t passed_on = 0;              // tiles so far

  // Asks for the next tile. The last to ask, one past the end for each block, wraps the counter to
  // zero: the next call finds it as this one did.
  __device__ __forceinline__ void draw() {
    drawn = atomicInc(params.tiles_drawn, params.slots - 1);
  }

  // The block of a tile at which the next tile is drawn.
  __device__ __forceinline__ static int draws_at(const Blocks& blocks) {
    return min(blocks.first + kDrawAhead, blocks.last - 1);
  }

  // The next tile, once it is drawn; false at the end.
  __device__ __forceinline__ bool next(Tile& tile) {
    const int index = gridDim.x + drawn;
    const uint32_t stage = passed_on % kTileStages, phase = passed_on / kTileStages % 2;
    tile = tile_at(params, index);
    if (index >= params.slots) {
      tile.blocks.last = tile.blocks.first;
    }
    shared.tile_empty[stage].wait(phase ^ 1);
    shared.tiles[stage] = tile;
    shared.tile_full[stage].arrive();
    ++passed_on;
    return index < params.slots;
  }
};

// The producer warp.
__device__ __forceinline__ void produce(const Params& params, SharedStorage& shared) {
  Loader loader{params, shared};
  TileScheduler tiles{params, shared};
  for (Tile tile; tiles.next(tile);) {
    loader.load_k(tile, tile.blocks.last - 1);
    loader.load_q(tile);
    for (int block = tile.blocks.last - 1; block >= tile.blocks.first; --block) {
      if (block == tiles.draws_at(tile.blocks)) {
        tiles.draw();
      }
      if (block > tile.blocks.first) {  // one ahead of V, because S is computed before P
        loader.load_k(tile, block - 1);
      }
      if (block == tile.blocks.last - 1) {
        loader.wait_for_output();
      }
      loader.load_v(tile, block);
    }
  }
}

// ---- Multiplying -----------------------------------------------------------------------------

// One warpgroup: 64 rows of each tile.
struct Consumer {
  const Params& params;
  SharedStorage& shared;
  const int warpgroup;  // 0 … kConsumers - 1
  RingPosition<kQStages> q;
  RingPosition<kStages> k, v;
  bool k_ready = false, v_ready = false;  // try_wait results of the current K and V

  __device__ __forceinline__ void wait_q() { shared.q_full[q.stage][warpgroup].wait(q.phase); }

  __device__ __forceinline__ void release_q(bool final_block) {
    if (lane() == 0 && final_block) {
      shared.q_empty[q.stage][warpgroup].arrive();
    }
  }

  // Even a successful wait has latency. So a try_wait for the next buffer is issued when one is
  // released, and its result arrives under the softmax.
  __device__ __forceinline__ void wait_k() {
    if (!k_ready) {
      shared.k_full[k.stage].wait(k.phase);
    }
  }

  __device__ __forceinline__ void release_k() {
    release(shared.k_empty[k.stage]);
    k.advance();
    k_ready = shared.k_full[k.stage].test_wait(k.phase);
  }

  __device__ __forceinline__ void wait_v() {
    if (!v_ready) {
      shared.v_full[v.stage].wait(v.phase);
    }
  }

  __device__ __forceinline__ void release_v() {
    release(shared.v_empty[v.stage]);
    v.advance();
    v_ready = shared.v_full[v.stage].test_wait(v.phase);
  }

  // One arrival per warp, since wgmma completes per warp.
  __device__ __forceinline__ void release(Barrier& empty) {
    if (lane() == 0) {
      empty.arrive();
    }
  }

  __device__ __forceinline__ int first_row(const Tile& tile) {
    return tile.first_row + warpgroup * kWarpgroupRows;
  }

  __device__ __forceinline__ Keys row_keys(const Tile& tile, int row) const {
    return seen_by(params, row);
  }

  // Masks the keys of a block that this thread's two rows do not see.
  __device__ __forceinline__ void mask_block(float (&s)[kBlockN / 2], const Tile& tile, int block) {
    const int row = first_row(tile) + thread_row(), first_key = block * kBlockN + lane() % 4 * 2;
    const Keys seen[2] = {row_keys(tile, row), row_keys(tile, row + 8)};
    const int last[2] = {seen[0].last - first_key, seen[1].last - first_key};
#pragma unroll
    for (int i = 0; i < kBlockN / 2; ++i) {
      if (column_of(i) >= last[row_of(i)]) {
        s[i] = -INFINITY;
      }
    }
  }

  // How many keys, from a block's first on, the first of this warp's rows sees.
  __device__ __forceinline__ int keys_seen(const Tile& tile, int block) {
    const Keys seen = row_keys(tile, first_row(tile) + warp_row());
    return seen.last - block * kBlockN;
  }

  // P as the register operand of the PV GEMM, whose layout is the accumulator's.
  using Probabilities = uint32_t[kBlockN * sizeof(Element) / 8];

  __device__ __forceinline__ void pack_p(Probabilities& p, const float (&s)[kBlockN / 2]) {
#pragma unroll
    for (int i = 0; i < kBlockN / 4; ++i) {
      p[i] = pack(s[2 * i], s[2 * i + 1]);
    }
  }

  // The descriptor of V, which lies by rows, and from it to that of its n-th row.
  __device__ __forceinline__ Descriptor v_begin() const {
    return descriptor<kVSlab>(shared.v[v.stage], kVDescriptor, kBlockN * kVSlab * sizeof(Element));
  }
  __device__ __forceinline__ static uint32_t v_offset(int n) {
    return n * kVSlab * sizeof(Element) >> 4;
  }

  // Issues O += PV.
  __device__ __forceinline__ void issue_pv(Output& o, Probabilities& p) {
    const Descriptor first = v_begin();
    fence_operand(o);
    fence_operand(p);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < kBlockN; n += kStepK) {
      wgmma_pv<true>(o, p + n * sizeof(Element) / 8, first + v_offset(n));
    }
    wgmma_commit();
  }

  // O is complete but for GEMMs that were issued later: V is released.
  template <int later = 0>
  __device__ __forceinline__ void finish_pv(Output& o) {
    wgmma_wait<later>();
    fence_operand(o);
    release_v();
  }

  // This thread's fp32 totals of O.
  __device__ __forceinline__ float4* totals() {
    return &shared.totals[warpgroup][0][threadIdx.x % kWarpgroup];
  }

  // The total, rescaled, with O added.
  __device__ __forceinline__ static float4 total_of(const Output& o, const Softmax& softmax, int i,
                                                    const float4* totals) {
    const float4 kept = softmax.begun ? totals[i / 4 * kWarpgroup] : float4{};
    const float (&missed)[2] = softmax.missed;
    return {fmaf(kept.x, missed[0], o[i]), fmaf(kept.y, missed[0], o[i + 1]),
            fmaf(kept.z, missed[1], o[i + 2]), fmaf(kept.w, missed[1], o[i + 3])};
  }

  __device__ __forceinline__ void promote(Output& o, Softmax& softmax) {
    float4* const to = totals();
#pragma unroll
    for (int i = 0; i < kOutputColumns / 2; i += 4) {
      to[i / 4 * kWarpgroup] = total_of(o, softmax, i, to);
      o[i] = o[i + 1] = o[i + 2] = o[i + 3] = 0.f;
    }
    softmax.begun = true;
    softmax.blocks = 0;
  }

  // O with the total, rescaled.
  __device__ __forceinline__ void collect(Output& o, const Softmax& softmax) {
    if (!softmax.begun) {
      return;
    }
    const float4* const from = totals();
#pragma unroll
    for (int i = 0; i < kOutputColumns / 2; i += 4) {
      const float4 total = total_of(o, softmax, i, from);
      o[i] = total.x;
      o[i + 1] = total.y;
      o[i + 2] = total.z;
      o[i + 3] = total.w;
    }
  }

  // Counts a block. Every kPromote of them O moves to its total, and whether it does is returned.
  __device__ __forceinline__ bool promotes(Output& o, Softmax& softmax) {
    if (++softmax.blocks == kPromote) {
      promote(o, softmax);
      softmax.missed[0] = softmax.rescale[0];
      softmax.missed[1] = softmax.rescale[1];
      return true;
    }
    softmax.missed[0] *= softmax.rescale[0];
    softmax.missed[1] *= softmax.rescale[1];
    return false;
  }

  // Makes O relative to the row maxima so far.
  __device__ __forceinline__ void rescale_output(Output& o, Softmax& softmax) {
    if (!softmax.raised) {
      softmax.rescale[0] = softmax.rescale[1] = 1.f;
    }
    if (promotes(o, softmax)) {
      return;
    }
    if (!softmax.raised) {
      return;
    }
#pragma unroll
    for (int i = 0; i < kOutputColumns / 2; ++i) {
      o[i] *= softmax.rescale[row_of(i)];
    }
  }

  // Issues S = QKᵀ.
  __device__ __forceinline__ void issue_qk(float (&s)[kBlockN / 2]) {
    const Descriptor q_rows = descriptor<kQkSlab>(
        shared.q[q.stage] + warpgroup * kWarpgroupRows * kHeadDimPadded, kQkDescriptor);
    const Descriptor k_rows = descriptor<kQkSlab>(shared.k[k.stage], kQkDescriptor);
    fence_operand(s);
    wgmma_fence();
    wgmma_qk<false>(s, q_rows, k_rows);
#pragma unroll
    for (int d = kStepK; d < kHeadDimPadded; d += kStepK) {
      wgmma_qk<true>(s, q_rows + column_offset<kWarpgroupRows, kQkSlab>(d),
                     k_rows + column_offset<kBlockN, kQkSlab>(d));
    }
    wgmma_commit();
  }

  // S is complete: K is released, and Q after the tile's final block.
  __device__ __forceinline__ void finish_qk(float (&s)[kBlockN / 2], bool final_block) {
    fence_operand(s);
    release_k();
    release_q(final_block);
  }

  // The softmax of rows before their first score.
  __device__ __forceinline__ Softmax fresh_softmax() const { return {params.scale_log2}; }

  // P of a tile's first block, whose S is complete and masked.
  __device__ __forceinline__ void first_scores(const Tile& tile, float (&s)[kBlockN / 2],
                                               Probabilities& p, Softmax& softmax) {
    softmax.update_row_max(s);
    softmax.exponentiate(s);
    pack_p(p, s);
    const int block = tile.blocks.last - 1;
    spread_first = block - (spread(tile, block, softmax) ? kSpreadBlocks : -1);
  }

  // P of a block whose S is complete and masked, relative to the maximum so far. Where that makes P
  // too large, which is rare, S is still there, and the maximum is updated after all: O is
  // rescaled.
  __device__ __forceinline__ void next_scores(float (&s)[kBlockN / 2], Probabilities& p, Output& o,
                                              Softmax& softmax) {
    float guessed[kBlockN / 2], part[2];
    const bool fits = __all_sync(0xffffffff, softmax.guess(s, guessed, part));
    pack_p(p, guessed);
    if (!fits) {
      part[0] = part[1] = 0.f;  // added to the sums already
      softmax.update_row_max(s);
      softmax.exponentiate(s);
      pack_p(p, s);
    }
    softmax.sum[0] += part[0];
    softmax.sum[1] += part[1];
    softmax.raised = !fits;
    rescale_output(o, softmax);
  }

  int spread_first;  // from this block on to the tile's last, maxima are found before P

  // The same while PV of the block before ends; with each_maximum the row maxima are found before
  // P.
  template <bool each_maximum>
  __device__ __forceinline__ void next_scores_under_pv(float (&s)[kBlockN / 2], Probabilities& p,
                                                       Output& o, Softmax& softmax) {
    if (each_maximum) {
      softmax.update_row_max(s);
    }
    finish_pv(o);
    fence_operand(s);  // P's registers are free only now
    if (each_maximum) {
      softmax.exponentiate(s);
      pack_p(p, s);
      softmax.raised = true;
      rescale_output(o, softmax);
    } else {
      next_scores(s, p, o, softmax);
    }
  }

  // Whether the first block's scores are widely spread in most warps of the warpgroup, enough of
  // which see keys enough to tell: all must take the same steps.
  __device__ __forceinline__ bool spread(const Tile& tile, int block, const Softmax& softmax) {
    uint8_t (&votes)[4] = shared.votes[warpgroup];
    const int vote = softmax.spread() | (keys_seen(tile, block) >= kSpreadKeys) << 4;
    if (lane() == 0) {
      votes[threadIdx.x % kWarpgroup / 32] = vote;
    }
    barrier_sync(kStore + warpgroup, kWarpgroup);
    const int counted = votes[0] + votes[1] + votes[2] + votes[3];
    return counted % 16 >= kSpreadWarps && counted / 16 >= kSpreadSeeing;
  }

  __device__ __forceinline__ void pass_on_turn() {
    barrier_arrive(kScheduler + (warpgroup + 1 == kConsumers ? 0 : warpgroup + 1), 2 * kWarpgroup);
  }

  // Ping-pong: while one warpgroup has the tensor cores, the others do softmax. A turn ends when
  // GEMMs are issued, before any wait for Q; a block that is skipped has its turn too.
  __device__ __forceinline__ void begin_turn(const Tile&) {
    barrier_sync(kScheduler + warpgroup, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void end_turn(const Tile&) { pass_on_turn(); }

  // One block, with two GEMMs in flight: S of this block and PV of the block before. Its softmax
  // runs under the GEMMs of other warpgroups.
  template <bool masked, bool each_maximum = false>
  __device__ __forceinline__ void step(const Tile& tile, int block, float (&s)[kBlockN / 2],
                                       Probabilities& p, Output& o, Softmax& softmax) {
    wait_k();
    begin_turn(tile);
    issue_qk(s);
    wait_v();
    issue_pv(o, p);
    end_turn(tile);
    wgmma_wait<1>();
    finish_qk(s, block == tile.blocks.first);
    if (masked) {
      mask_block(s, tile, block);
    }
    next_scores_under_pv<each_maximum>(s, p, o, softmax);
  }

  // P of a tile's first block, once its S is complete.
  __device__ __forceinline__ void finish_first(const Tile& tile, float (&s)[kBlockN / 2],
                                               Probabilities& p, Softmax& softmax) {
    finish_qk(s, tile.blocks.last - 1 == tile.blocks.first);
    mask_block(s, tile, tile.blocks.last - 1);
    first_scores(tile, s, p, softmax);
  }

  // The first block of a tile, with nothing else in flight.
  __device__ __forceinline__ void first_block(const Tile& tile, float (&s)[kBlockN / 2],
                                              Probabilities& p, Softmax& softmax) {
    wait_q();
    wait_k();
    issue_qk(s);
    wgmma_wait<0>();
    finish_first(tile, s, p, softmax);
  }

  // The last PV of all tiles, with nothing else in flight.
  __device__ __forceinline__ void last_pv(Probabilities& p, Output& o) {
    wait_v();
    issue_pv(o, p);
    finish_pv(o);
  }

  // The last PV of a tile, then the first S of the next, under which O is stored.
  __device__ __forceinline__ void next_tile(Tile& tile, const Tile& next, float (&s)[kBlockN / 2],
                                            Probabilities& p, Output& o, Softmax& softmax) {
    wait_v();
    begin_turn(tile);
    issue_pv(o, p);
    end_turn(tile);
    q.advance();
    wait_q();
    wait_k();
    issue_qk(s);
    finish_pv<1>(o);
    store(tile, o, softmax);
    reset(o, softmax);
    tile = next;
    wgmma_wait<0>();
    finish_first(tile, s, p, softmax);
  }

  // All tiles that see a key; of the last one, O is yet to be stored.
  __device__ __forceinline__ void mainloop(Tiles& tiles, Tile& tile, Output& o, Softmax& softmax) {
    float s[kBlockN / 2];
    Probabilities p;
    first_block(tile, s, p, softmax);
    for (;;) {
      int block = tile.blocks.last - 2;
      for (; block >= tile.blocks.full_last; --block) {
        step<true>(tile, block, s, p, o, softmax);
      }
      // of widely spread scores, the first blocks
      for (; block >= max(tile.blocks.first, spread_first); --block) {
        step<false, true>(tile, block, s, p, o, softmax);
      }
      for (; block >= tile.blocks.first; --block) {
        step<false>(tile, block, s, p, o, softmax);
      }
      Tile next;
      if (!tiles.next(params, next)) {
        break;
      }
      next_tile(tile, next, s, p, o, softmax);
    }
    last_pv(p, o);
  }

  __device__ __forceinline__ void reset(Output& o, Softmax& softmax) {
#pragma unroll
    for (int i = 0; i < kOutputColumns / 2; ++i) {
      o[i] = 0.f;
    }
    softmax = fresh_softmax();
  }

  __device__ __forceinline__ void run() {
    if (warpgroup == kConsumers - 1) {
      pass_on_turn();  // warpgroup 0 is first
    }
    Tiles tiles{shared};
    EmptyTiles rest{tiles};
    Tile tile;
    Output o = {};
    Softmax softmax = fresh_softmax();
    bool has_tile = tiles.next(params, tile);
    if (has_tile) {
      mainloop(tiles, tile, o, softmax);
    }
    // O of the last tile, and of those that see no key.
    has_tile = has_tile || rest.next(params, tile);
    while (has_tile) {
      store(tile, o, softmax);
      reset(o, softmax);
      has_tile = rest.next(params, tile);
    }
  }

  __device__ __forceinline__ int seqlen_q(const Tile&) const { return params.seqlen_q; }

  // Where LSE of a tile's head begins: the first row of its batch.
  __device__ __forceinline__ int64_t lse_begin(const Tile& tile) const {
    return tile.batch * params.lse_stride_batch + tile.head * params.lse_stride_head;
  }

  // Copies columns of the warpgroup's rows of O, from `column` on, a slab from shared memory.
  __device__ __forceinline__ void copy_out(const Tile& tile, const OutElement* slab, int column) {
    cute::SM90_TMA_STORE_4D::copy(&params.out, slab, column, first_row(tile), tile.head,
                                  tile.batch);
  }

  // Writes columns of the warpgroup's rows to shared memory, averages of V, from column `first` of
  // O on.
  template <int columns>
  __device__ __forceinline__ void round_rows(OutElement* rows, const Output& o, int first,
                                             const float (&inverse)[2], const bool (&empty)[2]) {
    const auto average = [&](int i) { return o[first / 2 + i] * inverse[row_of(i)]; };
    // A row that sees no key is zeros, not 0 times a V that may not be finite.
    const auto limited = [&](int i) { return empty[row_of(i)] ? 0.f : average(i); };
    // What is not finite shows what must be limited: rare, and cheaper to look for once it is
    // rounded.
    const bool finite = store_accumulator<columns, kOSlab, kOSwizzleBits>(rows, average);
    if (!__all_sync(0xffffffff, finite)) {
      store_accumulator<columns, kOSlab, kOSwizzleBits>(rows, limited);
    }
  }

  // Writes O through V's space, once all have read the last V of a tile.
  __device__ __forceinline__ void write(const Tile& tile, const Output& o,
                                        const float (&inverse)[2], const bool (&empty)[2]) {
    OutElement* rows = shared.o + warpgroup * kWarpgroupRows * kHeadDimVPadded;
    barrier_sync(kAllConsumers, kConsumers * kWarpgroup);  // V is read
    round_rows<kHeadDimVPadded>(rows, o, 0, inverse, empty);
    cutlass::arch::fence_view_async_shared();
    barrier_sync(kStore + warpgroup, kWarpgroup);
    if (threadIdx.x % kWarpgroup == 0) {
#pragma unroll
      for (int column = 0; column < kHeadDimVPadded; column += kOSlab) {
        copy_out(tile, rows + column * kWarpgroupRows, column);
      }
      cute::tma_store_arrive();
      cute::tma_store_wait<0>();
      shared.o_empty.arrive();
    }
  }

  // Writes the warpgroup's rows of O and LSE.
  __device__ __forceinline__ void store(const Tile& tile, Output& o, Softmax& softmax) {
    float inverse[2];
    bool empty[2];  // no key seen
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(softmax.sum[r]);
      empty[r] = sum == 0.f;
      inverse[r] = reciprocal_approx(sum);
      const int row = first_row(tile) + thread_row() + r * 8;
      if (params.lse && lane() % 4 == 0 && row < seqlen_q(tile)) {
        const int64_t head = lse_begin(tile);
        params.lse[head + row] =
            empty[r] ? -INFINITY : (softmax.reference(r) + log2_approx(sum)) * 0.69314718056f;
      }
    }
    collect(o, softmax);
    write(tile, o, inverse, empty);
  }
};

// ---- The kernel ------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads, 1)
    attention_forward(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);

  if (threadIdx.x == 0) {
    cute::prefetch_tma_descriptor(&params.q);
    cute::prefetch_tma_descriptor(&params.k);
    cute::prefetch_tma_descriptor(&params.v);
    cute::prefetch_tma_descriptor(&params.out);
    for (int stage = 0; stage < kQStages; ++stage) {
      for (int consumer = 0; consumer < kConsumers; ++consumer) {
        shared.q_full[stage][consumer].init(1);
        shared.q_empty[stage][consumer].init(kWarpgroup / 32);
      }
    }
    for (int stage = 0; stage < kStages; ++stage) {
      shared.k_full[stage].init(1);
      shared.v_full[stage].init(1);
      shared.k_empty[stage].init(kConsumers * kWarpgroup / 32);
      shared.v_empty[stage].init(kConsumers * kWarpgroup / 32);
    }
    shared.o_empty.init(kConsumers);
    for (int stage = 0; stage < kTileStages; ++stage) {
      shared.tile_full[stage].init(1);
      shared.tile_empty[stage].init(kTileReaders);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  const int warpgroup =
      __shfl_sync(0xffffffff, threadIdx.x / kWarpgroup, 0);  // known to be uniform
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    if (threadIdx.x == 0) {
      produce(params, shared);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    Consumer consumer{params, shared, warpgroup - 1};
    consumer.run();
  }
}

}  // namespace fagen_fwd_bf16_d128_causal_m128n128_reusev_pm64_smemtotals_kernel

// ---- The C interface -------------------------------------------------------------------------

#ifndef FAGEN_FORWARD_ARGS
#define FAGEN_FORWARD_ARGS 3

extern "C" {

// One call of a kernel of kind forward: the same struct for all of them. Strides are in elements; a
// dimension without one is contiguous.
struct FagenForwardArgs {
  uint32_t struct_bytes;  // sizeof(FagenForwardArgs)
  uint32_t version;       // 3: callers built for another are recognised
  void* workspace;  // from a multiple of 16 bytes on as large as fagen_<slug>_workspace says; null
                    // where that is nothing
  int64_t workspace_bytes;  // how large it is
  const void* q;            // bf16 (batch, seqlen_q, heads, 128)
  const void* k;            // bf16 (batch, seqlen_k, kv_heads, 128)
  const void* v;            // bf16 (batch, seqlen_k, kv_heads, 128)
  const void* q_descale;    // null: of other kernels
  const void* k_descale;    // null: of other kernels
  const void* v_descale;    // null: of other kernels
  const void* v_mean;       // null: of other kernels
  const void* k_mean;       // null: of other kernels
  void* out;                // bf16 (batch, seqlen_q, heads, 128): zeros in a row that sees no key
  void* lse;  // fp32 (batch, heads, seqlen_q): log-sum-exp, natural logarithm; minus infinity in a
              // row that sees no key; null if not wanted
  int64_t q_stride_batch, q_stride_head, q_stride_seq;
  int64_t k_stride_batch, k_stride_head, k_stride_seq;
  int64_t v_stride_batch, v_stride_head, v_stride_seq;
  int64_t q_descale_stride_batch, q_descale_stride_head;
  int64_t k_descale_stride_batch, k_descale_stride_head;
  int64_t v_descale_stride_batch, v_descale_stride_column, v_descale_stride_head;
  int64_t v_mean_stride_batch, v_mean_stride_column, v_mean_stride_head;
  int64_t k_mean_stride_batch, k_mean_stride_column, k_mean_stride_head;
  int64_t out_stride_batch, out_stride_head, out_stride_seq;
  int64_t lse_stride_batch, lse_stride_head;
  int32_t batch, heads, kv_heads, seqlen_q, seqlen_k;
  float scale;  // of q kᵀ before the softmax; finite and positive, 1e+08 at most
};

}  // extern "C"

#elif FAGEN_FORWARD_ARGS != 3
#error "kernels of kind forward of two versions of fagen in one translation unit"
#endif

#ifndef FAGEN_KERNEL_INFO
#define FAGEN_KERNEL_INFO 2

extern "C" {

// What a kernel says of itself.
struct FagenKernelInfo {
  uint32_t struct_bytes;
  uint32_t shared_bytes;  // of a thread block
  uint32_t threads;       // of a thread block
  uint32_t launch_registers;
  const char* slug;
  const char* source_hash;
};

}  // extern "C"
#endif

extern "C" {

// Enqueues the kernel on `stream` (a cudaStream_t) of the current device: 0, or a status to
// explain.
int fagen_fwd_bf16_d128_causal_m128n128_reusev_pm64_smemtotals(const struct FagenForwardArgs* args,
                                                               void* stream);
// How many bytes of workspace a call of these sizes needs; -1 where args is null, or a call of such
// sizes is refused. They are zeros before the first call, and each call leaves them so; calls that
// may run at once need one each.
int64_t fagen_fwd_bf16_d128_causal_m128n128_reusev_pm64_smemtotals_workspace(
    const struct FagenForwardArgs* args);
const char* fagen_fwd_bf16_d128_causal_m128n128_reusev_pm64_smemtotals_message(int status);
const struct FagenKernelInfo* fagen_fwd_bf16_d128_causal_m128n128_reusev_pm64_smemtotals_info(void);

}  // extern "C"

// ---- The host's side -------------------------------------------------------------------------

#include "fagen_host.h"
#if FAGEN_HOST_H != 0xa95921b9
#error "the fagen_host.h beside this kernel is that of another version of fagen"
#endif

namespace fagen_fwd_bf16_d128_causal_m128n128_reusev_pm64_smemtotals_host {

using namespace fagen_fwd_bf16_d128_causal_m128n128_reusev_pm64_smemtotals_kernel;
using namespace fagen_host;
using fagen_host::ceil_div;  // of 64 bits: not what a kernel calls so

// What calls end with, by Status.
constexpr const char* kMessages[] = {
    "launched",
    "struct_bytes or version is that of another FagenForwardArgs",
    "a size is negative or too large",
    "heads must be a multiple of kv_heads",
    "there are 2^30 tiles or more",
    "scale must be finite and positive, scale 1e+08 at most",
    "a tensor is given that cannot be",
    "a tensor that is needed is null",
    "a tensor does not begin at a multiple of 16 bytes (lse: 4)",
    "a stride is negative, too large, or no multiple of 16 bytes",
    "elements of an output (out, lse) overlap: a stride is 0 or too small",
    "the workspace is null, too small, or does not begin at a multiple of 16 bytes",
    "the current device is not a Hopper GPU (compute capability 9.0)",
    "the CUDA driver is missing, or too old for tensor maps",
    "the CUDA driver refused to describe a tensor for TMA",
    "the kernel could not be launched",
};

// Whether sizes go together, and are not too large.
Status check_sizes(const FagenForwardArgs& a) {
  for (const int size : {a.batch, a.heads, a.kv_heads, a.seqlen_q, a.seqlen_k}) {
    if (size < 0 || size > 1073741824) {
      return kBadSize;
    }
  }
  if (a.kv_heads == 0 ? a.heads != 0 : a.heads % a.kv_heads != 0) {
    return kBadRatio;
  }
  if (double(ceil_div(a.seqlen_q, 128)) * double(a.heads) * double(a.batch) >= 1 << 30) {
    return kTooMany;
  }
  return kOk;
}

// Of a call whose sizes are checked, which has fewer than 2^30 of what each record is of.
int64_t workspace_bytes([[maybe_unused]] const FagenForwardArgs& a) {
  return int64_t(4);
}

Status check(const FagenForwardArgs& a) {
  if (a.struct_bytes != sizeof(a) || a.version != FAGEN_FORWARD_ARGS) {
    return kWrongStruct;
  }
  if (const Status status = check_sizes(a)) {
    return status;
  }
  if (!(a.scale > 0) || !std::isfinite(a.scale) || a.scale > 100000000.0) {
    return kBadScalar;
  }
  for (const Status status : {
           check_tensor(a.q, 2, true, false, kMostStride, 128,
                        {{a.batch, a.q_stride_batch},
                         {a.seqlen_q, a.q_stride_seq},
                         {a.heads, a.q_stride_head}}),
           check_tensor(a.k, 2, true, false, kMostStride, 128,
                        {{a.batch, a.k_stride_batch},
                         {a.seqlen_k, a.k_stride_seq},
                         {a.kv_heads, a.k_stride_head}}),
           check_tensor(a.v, 2, true, false, kMostStride, 128,
                        {{a.batch, a.v_stride_batch},
                         {a.seqlen_k, a.v_stride_seq},
                         {a.kv_heads, a.v_stride_head}}),
           check_tensor(a.out, 2, true, true, kMostStride, 128,
                        {{a.batch, a.out_stride_batch},
                         {a.seqlen_q, a.out_stride_seq},
                         {a.heads, a.out_stride_head}}),
           !a.lse ? kOk
                  : check_tensor(a.lse, 4, false, true, kMostStride, a.seqlen_q,
                                 {{a.batch, a.lse_stride_batch}, {a.heads, a.lse_stride_head}}),
       }) {
    if (status) {
      return status;
    }
  }
  const int64_t needed = workspace_bytes(a);
  const bool misplaced = reinterpret_cast<uintptr_t>(a.workspace) % kAlignment != 0;
  return needed > 0 && (!a.workspace || a.workspace_bytes < needed || misplaced) ? kBadWorkspace
                                                                                 : kOk;
}

Status launch(const FagenForwardArgs& a, cudaStream_t stream) {
  if (a.batch == 0 || a.heads == 0 || a.seqlen_q == 0) {
    return kOk;
  }
  constexpr int shared_bytes = sizeof(SharedStorage);
  const int multiprocessors = prepare_device<attention_forward>(shared_bytes);
  if (multiprocessors == 0) {
    return kNotHopper;
  }
  if (!encode_tiled()) {
    return kNoDriver;
  }

  Params params;
  params.lse = static_cast<float*>(a.lse);
  params.lse_stride_batch = a.lse_stride_batch;
  params.lse_stride_head = a.lse_stride_head;
  params.heads = FastDivisor(a.heads);
  params.heads_per_kv_head = FastDivisor(a.heads / a.kv_heads);
  params.seqlen_q = a.seqlen_q;
  params.seqlen_k = a.seqlen_k;
  params.tiles_drawn = static_cast<uint32_t*>(a.workspace);
  params.scale_log2 = a.scale * 1.44269504089f;

  const int m_blocks = int(ceil_div(a.seqlen_q, kBlockM));
  params.m_blocks = m_blocks;
  const int tiles = m_blocks * a.heads * a.batch;
  const int grid = std::min(tiles, multiprocessors);

  // Whether no row of a tile sees a key: of the first ones, or of the last ones.
  const auto is_empty = [&](int m_block) {
    const Blocks blocks = blocks_of(params, m_block * kBlockM, m_block * kBlockM + kBlockM - 1);
    return blocks.last <= blocks.first;
  };
  params.has_empty_tiles = is_empty(0) || is_empty(m_blocks - 1);

  // Tiles come in sections of heads whose K and V fit their share of the L2 cache.
  const int64_t flat_heads = int64_t(a.heads) * a.batch;
  const int64_t head_bytes = int64_t(a.seqlen_k) * (kHeadDim + kHeadDimV) * sizeof(Element);
  const int64_t cached_kv_heads = kL2Share / std::max<int64_t>(1, head_bytes);

  // Tiles that see no key are left to the end, and are no part of the order.
  int m_first = 0;
  params.m_end = m_blocks;
  while (m_first < m_blocks && is_empty(m_first)) {
    ++m_first;
  }
  while (params.m_end > m_first && is_empty(params.m_end - 1)) {
    --params.m_end;
  }
  // The heads of one KV head at a time: who shares K and V loads them at the same time. The last
  // section has more heads, so that short tiles fill up behind its longest ones: as many as the
  // cache holds, within bounds.
  const int64_t seeing = std::max(1, params.m_end - m_first);  // tiles of a head
  const int64_t section = params.heads_per_kv_head.value;
  const int64_t least = ceil_div(int64_t(kSectionRounds) * grid, seeing), most = 4 * least;
  const int64_t last = std::clamp(cached_kv_heads * section, least, most);
  params.sections = 1 + int(std::max<int64_t>(0, flat_heads - last) / section);
  params.section_heads = FastDivisor(int(section));
  params.section_slots = FastDivisor(int(std::min<int64_t>(section * seeing, tiles)));
  params.last_section_heads = FastDivisor(int(flat_heads - (params.sections - 1) * section));
  params.slots = int(flat_heads * (params.m_end - m_first));
  params.tiles = tiles;

  const Tensor q{.data = a.q,
                 .sizes = {kHeadDim, a.seqlen_q, a.heads, a.batch},
                 .strides = {a.q_stride_seq, a.q_stride_head, a.q_stride_batch},
                 .box = {kQkSlab, kWarpgroupRows, 1, 1},
                 .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                 .type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                 .element_bytes = sizeof(Element),
                 .promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B};
  if (!describe(&params.q, q)) {
    return kTensorMapRefused;
  }

  const Tensor k{.data = a.seqlen_k > 0 ? a.k : a.q,
                 .sizes = {kHeadDim, a.seqlen_k, a.kv_heads, a.batch},
                 .strides = {a.k_stride_seq, a.k_stride_head, a.k_stride_batch},
                 .box = {kQkSlab, kBlockN, 1, 1},
                 .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                 .type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                 .element_bytes = sizeof(Element),
                 .promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B};
  if (!describe(&params.k, k)) {
    return kTensorMapRefused;
  }

  const Tensor v{.data = a.seqlen_k > 0 ? a.v : a.q,
                 .sizes = {kHeadDimV, a.seqlen_k, a.kv_heads, a.batch},
                 .strides = {a.v_stride_seq, a.v_stride_head, a.v_stride_batch},
                 .box = {kVSlab, kBlockN, 1, 1},
                 .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                 .type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                 .element_bytes = sizeof(Element),
                 .promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B};
  if (!describe(&params.v, v)) {
    return kTensorMapRefused;
  }

  const Tensor out{.data = a.out,
                   .sizes = {kHeadDimV, a.seqlen_q, a.heads, a.batch},
                   .strides = {a.out_stride_seq, a.out_stride_head, a.out_stride_batch},
                   .box = {kOSlab, kWarpgroupRows, 1, 1},
                   .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                   .type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                   .element_bytes = sizeof(OutElement),
                   .promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B};
  if (!describe(&params.out, out)) {
    return kTensorMapRefused;
  }

  attention_forward<<<grid, kThreads, shared_bytes, stream>>>(params);
  return cudaGetLastError() == cudaSuccess ? kOk : kLaunchFailed;
}

}  // namespace fagen_fwd_bf16_d128_causal_m128n128_reusev_pm64_smemtotals_host

extern "C" int fagen_fwd_bf16_d128_causal_m128n128_reusev_pm64_smemtotals(
    const FagenForwardArgs* args, void* stream) {
  using namespace fagen_fwd_bf16_d128_causal_m128n128_reusev_pm64_smemtotals_host;
  const Status status = args ? check(*args) : kNullPointer;
  return status ? status : launch(*args, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t fagen_fwd_bf16_d128_causal_m128n128_reusev_pm64_smemtotals_workspace(
    const FagenForwardArgs* args) {
  using namespace fagen_fwd_bf16_d128_causal_m128n128_reusev_pm64_smemtotals_host;
  return args && !check_sizes(*args) ? workspace_bytes(*args) : -1;
}

extern "C" const char* fagen_fwd_bf16_d128_causal_m128n128_reusev_pm64_smemtotals_message(
    int status) {
  using namespace fagen_fwd_bf16_d128_causal_m128n128_reusev_pm64_smemtotals_host;
  constexpr int kNoKernel = 100;  // of who chooses among kernels
  return status >= 0 && status <= kLaunchFailed ? kMessages[status]
         : status == kNoKernel                  ? "no kernel computes that"
                                                : "unknown status";
}

extern "C" const FagenKernelInfo* fagen_fwd_bf16_d128_causal_m128n128_reusev_pm64_smemtotals_info(
    void) {
  using namespace fagen_fwd_bf16_d128_causal_m128n128_reusev_pm64_smemtotals_kernel;
  static const FagenKernelInfo info = {
      sizeof(FagenKernelInfo),
      kSharedBytes,
      kThreads,
      kLaunchRegisters,
      "fwd_bf16_d128_causal_m128n128_reusev_pm64_smemtotals",
      "9cadaf042984e4cdb342a95eadbd8b2d5329a2bfe0f11a6073a1fd607188057d"};
  return &info;
}
// sha256 of what is above: 8ce0dd9843b6f93b01caa617a91146c1a5239b4d914f12a6a1604c3519dd828a
