// fwd_e4m3_d128_causal_m128n160_nointer_vrows_sblock_pm1_pc64: fused attention forward for Hopper
// (sm_90a). Rendered by fagen; do not edit.
//
//   out = softmax(scale * q kᵀ) v,   lse = log(sum(exp(scale * q kᵀ)))
//
// One thread block computes a tile of 128 query rows of one head, 160 keys at a time from the last
// to the first, by online softmax in base 2. One producer warp copies Q, K and V into shared memory
// by TMA; 2 consumer warpgroups of 64 rows each multiply by WGMMA.
//
// Q, K, V and P are in e4m3, with scales. The PV GEMM needs V transposed: other warps of the
// producer's warpgroup do that. One warp writes the scales of blocks to shared memory.
//
// Needs fagen_host.h, which lies beside it, the headers below, and
// -gencode=arch=compute_90a,code=sm_90a.

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
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

namespace fagen_fwd_e4m3_d128_causal_m128n160_nointer_vrows_sblock_pm1_pc64_kernel {

// ---- The schedule ----------------------------------------------------------------------------

using Element = __nv_fp8_e4m3;
constexpr int kHeadDim = 128;
constexpr int kHeadDimV = 128;
constexpr int kHeadDimPadded = 128;  // in shared memory, padded with zeros
constexpr int kHeadDimVPadded = 128;
constexpr int kBlockM = 128;
constexpr int kBlockN = 160;
constexpr int kStages = 2;  // K and V buffers
constexpr int kQStages = 1;
constexpr int kConsumers = 2;  // warpgroups of 64 query rows
constexpr int kThreads = 384;
constexpr int kLaunchRegisters = 168;
constexpr int kStepK = 32;    // the K of every wgmma
constexpr int kQkSlab = 128;  // columns of a slab: one swizzle span, all rows of a slab together
constexpr auto kQkDescriptor = cute::SM90::GMMA::LayoutType::B128;

constexpr int kProducerRegisters = 56;
constexpr int kConsumerRegisters = 224;

constexpr int64_t kL2Share = 26214400;  // bytes of the L2 cache for K and V

constexpr int kSectionRounds = 2;  // tiles for each SM in the last section of heads

constexpr int kTileStages = 2;    // tiles drawn and not yet done
constexpr int kTileReaders = 11;  // warps that ask for them
// Blocks before its end that a tile's successor is drawn: enough to hide the answer's way.
constexpr int kDrawAhead = 2;

constexpr int kUnrolledCopies = 8;  // that a thread issues without a loop

constexpr int kTransposedLoads = 4;  // units in flight while one is stored; each has four registers

constexpr int kKAhead = 1;  // blocks that K is loaded ahead of V

constexpr int kVSlab = 32;  // of keys: V lies transposed
constexpr auto kVDescriptor = cute::SM90::GMMA::LayoutType::B32;
constexpr int kVSwizzleBits = 1;
constexpr int kVRowsSlab = 128;  // of V as it arrives
constexpr int kVRowsSwizzleBits = 3;
constexpr int kTransposers = 3;  // warps of the producer's warpgroup

constexpr float kNoScore = -1e+30f;  // where row maxima start: finite, so that no exponent is NaN
constexpr float kFarScale = 0.5f;    // no smaller one makes exponents of 2^24 of products of e4m3
// Log2 units: P is kept this much larger, to use more of its range. Less than 8.0, so that an
// exponent that is too coarse for it stays what it is, and does not become lower by twice as much.
constexpr float kPOffset = 7.999999523162842f;

constexpr int kOutputColumns = 128;

constexpr int kScaleRows = 64;  // rows of Q, or keys, that share a scale
constexpr int kGroupKeys =
    32;  // that share one in a block: kScaleRows and kBlockN are multiples of it
constexpr int kGroups = kBlockN / kGroupKeys;

constexpr int kPartColumns = 64;  // of PV at a time

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
  int skipped;    // fully masked blocks after those
};

// Descales in global memory, by batch and head, one for each block of rows where scales are by
// block.
struct ScaleTensor {
  const float* data;
  int64_t stride_batch, stride_head;

  __device__ __forceinline__ const float* at(int batch, int head) const {
    return data + batch * stride_batch + head * stride_head;
  }
};

// Reads the numbers of a thread's columns of O, two neighbours of each eight.
struct ColumnReader {
  const float* at;
  int64_t stride;

  __device__ __forceinline__ float2 next() {
    const float2 pair = {__ldg(at), __ldg(at + stride)};
    at += 8 * stride;
    return pair;
  }

  // Never true, but the compiler cannot know: it would load all columns at once, for which there
  // are no registers.
  __device__ __forceinline__ bool ends() {
    asm volatile("" : "+l"(at));
    return !at;
  }
};

// A number for each column of a head; strides are 0 where one serves for all.
struct ColumnTensor {
  const float* data;
  int64_t stride_batch, stride_head, stride_column;

  __device__ __forceinline__ const float* of(int batch, int head) const {
    return data + batch * stride_batch + head * stride_head;
  }

  __device__ __forceinline__ void prefetch(int batch, int head, int column) const {
    if (data) {
      asm volatile("prefetch.global.L1 [%0];" ::"l"(of(batch, head) + column * stride_column));
    }
  }
};

using BlockScales = float[kGroups];  // K's descales of a block

struct SharedStorage {
  alignas(1024) Element q[kQStages][kBlockM * kHeadDimPadded];
  alignas(1024) Element k[kStages][kBlockN * kHeadDimPadded];
  alignas(1024) Element v_rows[kStages][kBlockN * kHeadDimVPadded];  // row-major, as they arrive
  alignas(1024) Element v[kStages][kBlockN * kHeadDimVPadded];
  alignas(1024) OutElement o[kBlockM * kHeadDimVPadded];
  alignas(1024) float scales[kStages][kGroups];
  alignas(1024) TransactionBarrier q_full[kQStages][kConsumers];
  TransactionBarrier k_full[kStages];
  TransactionBarrier v_full[kStages];
  TransactionBarrier v_rows_full[kStages];
  Barrier v_rows_empty[kStages];
  Barrier q_empty[kQStages][kConsumers];
  Barrier k_empty[kStages];
  Barrier v_empty[kStages];
  Barrier tile_full[kTileStages];
  Barrier tile_empty[kTileStages];
  Tile tiles[kTileStages];  // in work, and next
};
constexpr int kSharedBytes = sizeof(SharedStorage);
static_assert(kSharedBytes <= 174080, "the layout outgrew the plan's ledger");

struct Params {
  CUtensorMap q, k, v, out;
  float* lse;  // may be null
  int64_t lse_stride_batch, lse_stride_head;
  ScaleTensor q_scale, k_scale;
  ColumnTensor v_scale, v_mean, k_mean;
  const Element* q_rows;
  int64_t q_stride_batch, q_stride_head, q_stride_seq;
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

// Four numbers of e4m3, saturated, the first in the lowest byte.
__device__ __forceinline__ uint32_t pack(float a, float b, float c, float d) {
  uint32_t quad;
  asm("{ .reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, { low, high }; }"
      : "=r"(quad)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return quad;
}

using Part = float[kPartColumns / 2];  // of PV, to be added to O

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
  float max[2] = {kNoScore, kNoScore};  // of the exponents
  float sum[2] = {0.f, 0.f};            // of this thread's part of P
  float rescale[2] = {1.f, 1.f};        // of O, from the last reference to this one

  static constexpr int kShare = kBlockN / 2 / kGroups;  // a thread's scores under one scale

  // What a row's exponents are relative to. It is rounded here and nowhere else: P, its sum and the
  // log-sum-exp of a row share that rounding, and it cancels out.
  __device__ __forceinline__ float reference(int r) const { return max[r] - kPOffset; }

  __device__ __forceinline__ float offset_of(int r) const { return -reference(r); }

  // From scores of a block to exponents. A large one is cut off to as few bits as make its products
  // with scores exact: these are sums in 14 bits. Else the largest exponent would be rounded, by
  // more than P holds.
  __device__ __forceinline__ float factor_of(float k_scale) const {
    const float factor = scale * k_scale;
    return factor < kFarScale ? factor : __uint_as_float(__float_as_uint(factor) & 0xffffc000);
  }

  // The row maxima with a block of scores.
  __device__ __forceinline__ void find_top(const float (&s)[kBlockN / 2], float (&top)[2],
                                           const BlockScales& block) const {
    top[0] = max[0];
    top[1] = max[1];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      float chains[4];
      find_largest<kShare>(s + g * kShare, chains);
      const float factor = factor_of(block[g]);
      top[0] = fmaxf(top[0], fmaxf(chains[0], chains[2]) * factor);
      top[1] = fmaxf(top[1], fmaxf(chains[1], chains[3]) * factor);
    }
  }

  // Updates the row maxima by a block of scores, and rescales the sums.
  __device__ __forceinline__ void update_row_max(const float (&s)[kBlockN / 2],
                                                 const BlockScales& block) {
    float top[2];
    find_top(s, top, block);
    const float old[2] = {reference(0), reference(1)};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      max[r] = quad_max(top[r]);
      rescale[r] = exp2_approx(old[r] - reference(r));
    }
    sum[0] *= rescale[0];
    sum[1] *= rescale[1];
  }

  // P of a block of scores, with these offsets, and its row sums.
  __device__ __forceinline__ void exponentiate(const float (&s)[kBlockN / 2],
                                               float (&p)[kBlockN / 2], float (&part)[2],
                                               const BlockScales& block,
                                               const float (&offset)[2]) const {
    Chains chains;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      exponentiate_group<kShare>(s + g * kShare, p + g * kShare, factor_of(block[g]), offset,
                                 chains, g == 0);
    }
    part[0] = sum_of(chains, 0);
    part[1] = sum_of(chains, 1);
  }

  // P of a block of scores, in place, relative to the row maxima; its row sums are added up.
  __device__ __forceinline__ void exponentiate(float (&s)[kBlockN / 2], const BlockScales& block) {
    const float offset[2] = {offset_of(0), offset_of(1)};
    float part[2];
    exponentiate(s, s, part, block, offset);
    sum[0] += part[0];
    sum[1] += part[1];
  }
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
  // A grid has one layer, and 0 is added. An upper word that the compiler knows it would move
  // beside the lower one before each wgmma; this one stays in a register.
  return {start >> 4 | leading_byte_offset >> 4 << 16,
          (stride_byte_offset >> 4 | uint32_t(layout) << 30) + blockIdx.z};
}

// From a descriptor to that of the k-th column of a tile of `rows` rows.
template <int rows, int slab>
__device__ constexpr uint32_t column_offset(int k) {
  return (k / slab * rows * slab + k % slab) * sizeof(Element) >> 4;
}

// S = or += Q Kᵀ, kStepK columns of each, both from shared memory.
template <bool accumulate>
__device__ __forceinline__ void wgmma_qk(float (&c)[80], Descriptor a, Descriptor b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n160k32.f32.e4m3.e4m3 "
      "{ %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79 }, "
      "%80, %81, %82, 1, 1;"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]),
        "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]),
        "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]),
        "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]),
        "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]),
        "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]),
        "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]),
        "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]),
        "+f"(c[63]), "+f"(c[64]), "+f"(c[65]), "+f"(c[66]), "+f"(c[67]), "+f"(c[68]), "+f"(c[69]),
        "+f"(c[70]), "+f"(c[71]), "+f"(c[72]), "+f"(c[73]), "+f"(c[74]), "+f"(c[75]), "+f"(c[76]),
        "+f"(c[77]), "+f"(c[78]), "+f"(c[79])
      : "l"(a.bits()), "l"(b.bits()), "n"(accumulate ? 1 : 0));
}

// kPartColumns columns of O = or += P V, kStepK keys of each, P from registers.
template <bool accumulate>
__device__ __forceinline__ void wgmma_pv(float (&c)[32], const uint32_t* a, Descriptor b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
      "{ %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31 }, "
      "{ %32, %33, %34, %35 }, %36, %37, 1, 1;"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]),
        "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]),
        "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]),
        "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()), "n"(accumulate ? 1 : 0));
}

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

  // Row-major, for the transposers.
  __device__ __forceinline__ void load_v(const Tile& tile, int block) {
    shared.v_rows_empty[v.stage].wait(v.phase ^ 1);
    copy<kHeadDimVPadded, kBlockN, kVRowsSlab>(
        params.v, shared.v_rows_full[v.stage], shared.v_rows[v.stage], block * kBlockN,
        tile.kv_head, of_k(tile), cute::TMA::CacheHintSm90::EVICT_LAST);
    v.advance();
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
      loader.load_v(tile, block);
    }
  }
}

// The descale of keys that share one.
struct Descales {
  float k;

  __device__ __forceinline__ void read(const Params& params, const Tile& tile, int group) {
    k = __ldg(params.k_scale.at(tile.batch, tile.kv_head) + group);
  }

  __device__ __forceinline__ void write(float& scale) const { scale = k; }
};

// Writes the descales of a block to shared memory. Used by a whole warp: its lanes read those of
// kBlocks blocks at once, and each writes its own when that block comes.
struct ScaleProducer {
  static constexpr int kBlocks = 32 / kGroups;

  const Params& params;
  SharedStorage& shared;
  RingPosition<kStages> k;
  Descales own;

  // Blocks come in the order of the tile, from the last to the first.
  __device__ __forceinline__ void write(const Tile& tile, int block) {
    const int first_lane = block % kBlocks * kGroups;  // of those with this block's descales
    if (block == tile.blocks.last - 1 || block % kBlocks == kBlocks - 1) {
      const int group = min((block * kGroups + lane() - first_lane) * kGroupKeys / kScaleRows,
                            (params.seqlen_k - 1) / kScaleRows);  // keys may end before
      own.read(params, tile, group);
    }
    shared.k_empty[k.stage].wait(k.phase ^ 1);
    __syncwarp();  // no lane misses the phase that another one's arrival ends
    if (lane() >= first_lane && lane() < first_lane + kGroups) {
      own.write(shared.scales[k.stage][lane() - first_lane]);
      shared.k_full[k.stage].arrive();
    }
    k.advance();
  }
};

// ---- Transposing V ---------------------------------------------------------------------------

// wgmma reads 8-bit V along its keys only, and here in the order of keys in which P lies in
// registers.

// Loads four 8x8 matrices of 16-bit elements, transposed; each lane gives the address of one row.
__device__ __forceinline__ void load_transposed(const void* address, uint32_t (&x)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { %0, %1, %2, %3 }, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(cute::cast_smem_ptr_to_uint(address))
               : "memory");
}

// What bits 4… of a byte's offset in a slab are xored with, by the offset of its row.
template <int swizzle_bits>
__device__ __forceinline__ uint32_t flip(uint32_t row_offset) {
  return (row_offset >> 3) & (((1 << swizzle_bits) - 1) << 4);
}

// Transposes a warp's part of a block, in units of 32 keys by 16 columns. To ldmatrix two columns
// are one 16-bit element: a lane gets keys 2q, 2q + 1, and from the next matrix 8 + 2q, 9 + 2q, of
// a pair of columns, where q is lane % 4. That is P's order already. What remains is to part the
// pair.
template <int transposer>
__device__ __forceinline__ void transpose(const Element* rows, Element* columns) {
  uint32_t lane;  // read anew, lest what follows from it stay in registers
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  const uint32_t key_row = lane * kVRowsSlab;  // a lane gives ldmatrix the address of its key
  const uint32_t source = key_row ^ flip<kVRowsSwizzleBits>(key_row);
  // stmatrix writes eight rows at once, which must be in different banks, as even columns alone are
  // not: so the lanes of the upper four pairs part them the other way round.
  const uint32_t even = lane < 16 ? 0x6420 : 0x7531;
  const uint32_t pair = lane % 8;  // whose address, in matrix lane / 8, this lane gives to stmatrix
  const uint32_t column_row = (2 * pair + (lane / 8 % 2 ^ pair / 4)) * kVSlab;
  const uint32_t target = (column_row + lane / 16 * 16) ^ flip<kVSwizzleBits>(column_row);

  constexpr int kKeyUnits = kBlockN / 32;
  constexpr int kUnits = kHeadDimVPadded / 16 * kKeyUnits;  // of all transposers
  constexpr int kFirst = ceil_div(transposer * kUnits, kTransposers);
  constexpr int kLast = ceil_div((transposer + 1) * kUnits, kTransposers);
  uint32_t x[kTransposedLoads][4];
#pragma unroll
  for (int next = kFirst; next < kLast + kTransposedLoads; ++next) {
    if (next >= kFirst + kTransposedLoads) {
      const int unit = next - kTransposedLoads, key = unit % kKeyUnits * 32,
                column = unit / kKeyUnits * 16;
      const uint32_t (&pairs)[4] = x[unit % kTransposedLoads];
      store_matrices(
          columns + (key / kVSlab * kHeadDimVPadded + column) * kVSlab + (target ^ key % kVSlab),
          __byte_perm(pairs[0], pairs[1], even), __byte_perm(pairs[0], pairs[1], even ^ 0x1111),
          __byte_perm(pairs[2], pairs[3], even), __byte_perm(pairs[2], pairs[3], even ^ 0x1111));
    }
    if (next < kLast) {
      const int key = next % kKeyUnits * 32, column = next / kKeyUnits * 16;
      load_transposed(rows + (column / kVRowsSlab * kBlockN + key) * kVRowsSlab +
                          (source ^ column % kVRowsSlab),
                      x[next % kTransposedLoads]);
    }
  }
}

// Transposes the next block, as one of the warps of the producer's warpgroup that do not load.
template <int transposer>
__device__ __forceinline__ void transpose_block(SharedStorage& shared, RingPosition<kStages>& v) {
  shared.v_rows_full[v.stage].wait(v.phase);
  shared.v_empty[v.stage].wait(v.phase ^ 1);
  transpose<transposer>(shared.v_rows[v.stage], shared.v[v.stage]);
  // For what wgmma reads and for what TMA overwrites.
  cutlass::arch::fence_view_async_shared();
  __syncwarp();
  if (lane() == 0) {
    shared.v_full[v.stage].arrive();
    shared.v_rows_empty[v.stage].arrive();
  }
  v.advance();
}

// The last transposer, which has no more units than any other, writes scales as well: as far ahead
// of V as K is loaded.
template <int transposer>
__device__ __forceinline__ void produce_transposed_v(const Params& params, SharedStorage& shared) {
  RingPosition<kStages> v;
  ScaleProducer scales{params, shared};
  Tiles tiles{shared};
  for (Tile tile; tiles.next(params, tile);) {
    for (int block = tile.blocks.last - 1 + kKAhead; block >= tile.blocks.first; --block) {
      if (block - kKAhead >= tile.blocks.first && transposer == kTransposers - 1) {
        scales.write(tile, block - kKAhead);
      }
      if (block >= tile.blocks.last) {
        continue;
      }
      transpose_block<transposer>(shared, v);
    }
  }
}

// Each has code of its own: so where its units lie is known there, but for a lane's part of it.
__device__ __forceinline__ void produce_transposed_v(const Params& params, SharedStorage& shared) {
  switch (__shfl_sync(0xffffffff, threadIdx.x / 32, 0) - (kWarpgroup / 32 - kTransposers)) {
    case 0:
      return produce_transposed_v<0>(params, shared);
    case 1:
      return produce_transposed_v<1>(params, shared);
    case 2:
      return produce_transposed_v<2>(params, shared);
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

  // Where a row of Q is in global memory.
  __device__ __forceinline__ const Element* q_row(const Tile& tile, int row) const {
    return params.q_rows + tile.batch * params.q_stride_batch + tile.head * params.q_stride_head +
           row * params.q_stride_seq;
  }

  // P as the register operand of the PV GEMM. There a thread has four neighbouring columns of a
  // row, where in the accumulator it has two and, eight columns on, two more. These are taken as
  // they are: V's keys lie in that order.
  using Probabilities = uint32_t[kBlockN * sizeof(Element) / 8];

  __device__ __forceinline__ void pack_p(Probabilities& p, const float (&s)[kBlockN / 2]) {
#pragma unroll
    for (int i = 0; i < kBlockN / 8; ++i) {
      const float* x = s + i / 2 * 8 + i % 2 * 2;
      p[i] = pack(x[0], x[1], x[4], x[5]);
    }
  }

  // The descriptor of V from a column on, which lies transposed, and from it to that of its n-th
  // key.
  __device__ __forceinline__ Descriptor v_begin(int column = 0) const {
    return descriptor<kVSlab>(shared.v[v.stage] + column * kVSlab, kVDescriptor);
  }
  __device__ __forceinline__ static uint32_t v_offset(int n) {
    return column_offset<kHeadDimVPadded, kVSlab>(n);
  }

  // What O's columns will be multiplied by, and their means, to the L1 cache before they are
  // needed.
  __device__ __forceinline__ void prefetch_columns(const Tile& tile) const {
    for (int column = threadIdx.x % kWarpgroup; column < kHeadDimV; column += kWarpgroup) {
      params.v_scale.prefetch(tile.batch, tile.kv_head, column);
      params.v_mean.prefetch(tile.batch, tile.kv_head, column);
    }
  }

  // Issues a part of PV: its columns from this one on. The tensor cores cut long sums off, so that
  // none goes beyond a block.
  __device__ __forceinline__ void issue_pv(Part& part, Probabilities& p, int column) {
    const Descriptor first = v_begin(column);
    fence_operand(part);
    fence_operand(p);
    wgmma_fence();
    wgmma_pv<false>(part, p, first);
#pragma unroll
    for (int n = kStepK; n < kBlockN; n += kStepK) {
      wgmma_pv<true>(part, p + n * sizeof(Element) / 8, first + v_offset(n));
    }
    wgmma_commit();
  }

  // Adds a part to O, which is made relative to the row maxima of the part's P.
  __device__ __forceinline__ void add(Output& o, Part& part, int column,
                                      const float (&rescale)[2]) {
    fence_operand(part);
#pragma unroll
    for (int i = 0; i < kPartColumns / 2; ++i) {
      o[column / 2 + i] = fmaf(o[column / 2 + i], rescale[row_of(i)], part[i]);
    }
  }

  // O += PV, of which the first part is under way; what is to be done meanwhile runs under the
  // second one. O is rescaled for this P, whatever the next one's row maxima are.
  template <class Meanwhile>
  __device__ __forceinline__ void finish_pv(Output& o, Part& part, Probabilities& p,
                                            const float (&rescale)[2], Meanwhile meanwhile) {
#pragma unroll
    for (int column = 0; column < kOutputColumns; column += kPartColumns) {
      if (column == kPartColumns) {
        meanwhile();
      }
      wgmma_wait<0>();
      add(o, part, column, rescale);
      if (column + kPartColumns < kOutputColumns) {
        issue_pv(part, p, column + kPartColumns);
      }
    }
    fence_operand(p);  // whose registers are free only now
    release_v();
  }

  __device__ __forceinline__ void finish_pv(Output& o, Part& part, Probabilities& p,
                                            const float (&rescale)[2]) {
    finish_pv(o, part, p, rescale, [] {});
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
    read_scales();
    release_k();
    release_q(final_block);
  }

  BlockScales key_scales;  // of the block whose scores come next

  // The softmax of a tile before its first score. A warp's 16 rows share a scale.
  __device__ __forceinline__ Softmax softmax_of(const Tile& tile) {
    prefetch_columns(tile);
    return {params.scale_log2 *
            q_scale_of(tile, min(first_row(tile) + warp_row(), params.seqlen_q - 1))};
  }

  __device__ __forceinline__ float q_scale_of(const Tile& tile, int row) const {
    return __ldg(params.q_scale.at(tile.batch, tile.head) + row / kScaleRows);
  }

  // The current K's scales, before it is released; not earlier, since the next GEMM would wait for
  // them.
  __device__ __forceinline__ void read_scales() {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      key_scales[g] = shared.scales[k.stage][g];
    }
    __syncwarp();  // one lane arrives for all
  }

  // The softmax of rows before their first score, of which softmax_of(tile) knows the scale.
  __device__ __forceinline__ static Softmax fresh_softmax() { return {}; }

  // What K's mean, taken off before K was quantised, adds to a row's scores, in log2 units. Four
  // lanes share a row.
  __device__ __forceinline__ float mean_score(const Tile& tile, int row) const {
    float sum = 0.f;
    if (row < seqlen_q(tile)) {
      const Element* q = q_row(tile, row);
      const float* mean = params.k_mean.of(tile.batch, tile.kv_head);
#pragma unroll 1
      for (int column = lane() % 4; column < kHeadDim; column += 4) {
        sum = fmaf(float(q[column]), __ldg(mean + column * params.k_mean.stride_column), sum);
      }
      sum *= q_scale_of(tile, row);
    }
    return params.scale_log2 * quad_sum(sum);
  }

  // P of a tile's first block, whose S is complete and masked.
  __device__ __forceinline__ void first_scores(const Tile& tile, float (&s)[kBlockN / 2],
                                               Probabilities& p, Softmax& softmax) {
    softmax.update_row_max(s, key_scales);
    softmax.exponentiate(s, key_scales);
    pack_p(p, s);
  }

  // P of a block whose S is complete and masked, while PV of the block before ends; O is rescaled
  // for it.
  __device__ __forceinline__ void next_scores_under_pv(float (&s)[kBlockN / 2], Probabilities& p,
                                                       Output& o, Part& part, Softmax& softmax) {
    const float rescale[2] = {softmax.rescale[0],
                              softmax.rescale[1]};  // of P, which is not yet added up
    softmax.update_row_max(s, key_scales);
    finish_pv(o, part, p, rescale, [&] { softmax.exponentiate(s, key_scales); });
    pack_p(p, s);
  }

  // What this warpgroup's rows see.
  __device__ __forceinline__ Blocks own_blocks(const Tile& tile) {
    return blocks_of(params, first_row(tile), first_row(tile) + kWarpgroupRows - 1);
  }

  // A tile without the last blocks that are fully masked for its own rows; one block is left even
  // so.
  __device__ __forceinline__ Tile warpgroup_tile(Tile tile) {
    const Blocks own = own_blocks(tile);
    const int first = tile.blocks.first, last = max(first + 1, own.last);
    tile.skipped = tile.blocks.last - last;
    tile.blocks = own;
    tile.blocks.first = first;
    tile.blocks.last = last;
    return tile;
  }

  // Skips fully masked blocks.
  __device__ __forceinline__ void skip_k(const Tile& tile) {
    for (int blocks = tile.skipped; blocks > 0; --blocks) {
      wait_k();
      release_k();
    }
  }

  __device__ __forceinline__ void skip_v(int blocks) {
    for (; blocks > 0; --blocks) {
      wait_v();
      release_v();
    }
  }

  // One block, with two GEMMs in flight: S of this block and PV of the block before. Its softmax
  // runs under the GEMMs of other warpgroups.
  template <bool masked>
  __device__ __forceinline__ void step(const Tile& tile, int block, float (&s)[kBlockN / 2],
                                       Probabilities& p, Output& o, Softmax& softmax) {
    wait_k();
    issue_qk(s);
    wait_v();
    Part part;
    issue_pv(part, p, 0);
    wgmma_wait<1>();
    finish_qk(s, block == tile.blocks.first);
    if (masked) {
      mask_block(s, tile, block);
    }
    next_scores_under_pv(s, p, o, part, softmax);
  }

  // P of a tile's first block, once its S is complete.
  __device__ __forceinline__ void finish_first(const Tile& tile, float (&s)[kBlockN / 2],
                                               Probabilities& p, Softmax& softmax) {
    finish_qk(s, tile.blocks.last - 1 == tile.blocks.first);
    skip_v(tile.skipped);
    mask_block(s, tile, tile.blocks.last - 1);
    first_scores(tile, s, p, softmax);
  }

  // The first block of a tile, with nothing else in flight.
  __device__ __forceinline__ void first_block(const Tile& tile, float (&s)[kBlockN / 2],
                                              Probabilities& p, Softmax& softmax) {
    wait_q();
    skip_k(tile);
    wait_k();
    issue_qk(s);
    wgmma_wait<0>();
    finish_first(tile, s, p, softmax);
  }

  // The last PV of all tiles, with nothing else in flight.
  __device__ __forceinline__ void last_pv(Probabilities& p, Output& o, const Softmax& softmax) {
    wait_v();
    Part part;
    issue_pv(part, p, 0);
    finish_pv(o, part, p, softmax.rescale);
  }

  // The last PV of a tile, then the first S of the next, under which O is stored.
  __device__ __forceinline__ void next_tile(Tile& tile, const Tile& next, float (&s)[kBlockN / 2],
                                            Probabilities& p, Output& o, Softmax& softmax) {
    wait_v();
    Part part;
    issue_pv(part, p, 0);
    finish_pv(o, part, p, softmax.rescale);
    const Softmax fresh = softmax_of(next);
    q.advance();
    wait_q();
    skip_k(next);
    wait_k();
    issue_qk(s);
    store(tile, o, softmax);
    reset(o, softmax);
    softmax = fresh;
    tile = next;
    wgmma_wait<0>();
    finish_first(tile, s, p, softmax);
  }

  // All tiles that see a key; of the last one, O is yet to be stored.
  __device__ __forceinline__ void mainloop(Tiles& tiles, Tile& tile, Output& o, Softmax& softmax) {
    float s[kBlockN / 2];
    Probabilities p;
    tile = warpgroup_tile(tile);
    first_block(tile, s, p, softmax);
    for (;;) {
      int block = tile.blocks.last - 2;
      for (; block >= tile.blocks.full_last; --block) {
        step<true>(tile, block, s, p, o, softmax);
      }
      for (; block >= tile.blocks.first; --block) {
        step<false>(tile, block, s, p, o, softmax);
      }
      Tile next;
      if (!tiles.next(params, next)) {
        break;
      }
      next_tile(tile, warpgroup_tile(next), s, p, o, softmax);
    }
    last_pv(p, o, softmax);
  }

  __device__ __forceinline__ void reset(Output& o, Softmax& softmax) {
#pragma unroll
    for (int i = 0; i < kOutputColumns / 2; ++i) {
      o[i] = 0.f;
    }
    softmax = fresh_softmax();
  }

  __device__ __forceinline__ void run() {
    Tiles tiles{shared};
    EmptyTiles rest{tiles};
    Tile tile;
    Output o = {};
    Softmax softmax = fresh_softmax();
    bool has_tile = tiles.next(params, tile);
    if (has_tile) {
      softmax = softmax_of(tile);
      mainloop(tiles, tile, o, softmax);
    }
    // O of the last tile, and of those that see no key.
    has_tile = has_tile || rest.next(params, tile);
    while (has_tile) {
      store(tile, o, softmax);
      reset(o, softmax);
      has_tile = rest.next(params, tile);
    }
    if (threadIdx.x % kWarpgroup == 0) {
      cute::tma_store_wait<0>();  // shared memory must outlive the copies from it
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

  // Multiplies O by V's descales.
  __device__ __forceinline__ void scale_columns(const Tile& tile, Output& o) const {
    ColumnReader scale = {
        params.v_scale.of(tile.batch, tile.kv_head) + lane() % 4 * 2 * params.v_scale.stride_column,
        params.v_scale.stride_column};
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; i += 4) {
      const float2 pair = scale.next();
      o[i] *= pair.x;
      o[i + 1] *= pair.y;
      o[i + 2] *= pair.x;
      o[i + 3] *= pair.y;
      if (i % 32 == 28 && scale.ends()) {
        return;
      }
    }
  }

  // Adds what was taken off V's columns, whose weights in a row add up to one.
  __device__ __forceinline__ void add_means(const Tile& tile, Output& o) const {
    ColumnReader mean = {
        params.v_mean.of(tile.batch, tile.kv_head) + lane() % 4 * 2 * params.v_mean.stride_column,
        params.v_mean.stride_column};
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; i += 4) {
      const float2 pair = mean.next();
      o[i] += pair.x;
      o[i + 1] += pair.y;
      o[i + 2] += pair.x;
      o[i + 3] += pair.y;
      if (i % 32 == 28 && mean.ends()) {
        return;
      }
    }
  }

  // Averages of V, with its descales and means.
  __device__ __forceinline__ void descale(const Tile& tile, Output& o, const float (&inverse)[2],
                                          const bool (&empty)[2]) const {
    const bool by_column = params.v_scale.data && params.v_scale.stride_column != 0;
    float factor[2] = {inverse[0], inverse[1]};
    if (params.v_scale.data && !by_column) {
      const float scale = __ldg(params.v_scale.of(tile.batch, tile.kv_head));
      factor[0] *= scale;
      factor[1] *= scale;
    }
#pragma unroll
    for (int i = 0; i < kHeadDimVPadded / 2; ++i) {
      o[i] *= factor[row_of(i)];
    }
    if (by_column) {
      scale_columns(tile, o);
    }
    if (params.v_mean.data) {
      add_means(tile, o);
    }
    // A row that sees no key is zeros, not 0 times a V that may not be finite, and without its
    // mean.
    if (__any_sync(0xffffffff, empty[0] || empty[1])) {
#pragma unroll
      for (int i = 0; i < kHeadDimVPadded / 2; ++i) {
        o[i] = empty[row_of(i)] ? 0.f : o[i];
      }
    }
  }

  // Writes columns of the warpgroup's rows to shared memory, from column `first` of O on.
  template <int columns>
  __device__ __forceinline__ void round_rows(OutElement* rows, const Output& o, int first,
                                             const float (&)[2], const bool (&)[2]) {
    store_accumulator<columns, kOSlab, kOSwizzleBits>(rows,
                                                      [&](int i) { return o[first / 2 + i]; });
  }

  // Writes columns of the warpgroup's rows of O, from column `first` on, through a buffer of so
  // many.
  template <int columns>
  __device__ __forceinline__ void write_columns(const Tile& tile, const Output& o, int first,
                                                const float (&inverse)[2], const bool (&empty)[2]) {
    OutElement* rows = shared.o + warpgroup * kWarpgroupRows * columns;
    const bool leader = threadIdx.x % kWarpgroup == 0;
    if (leader) {
      cute::tma_store_wait<0>();  // what was there before has been read
    }
    barrier_sync(kStore + warpgroup, kWarpgroup);
    round_rows<columns>(rows, o, first, inverse, empty);
    cutlass::arch::fence_view_async_shared();
    barrier_sync(kStore + warpgroup, kWarpgroup);
    if (leader) {
#pragma unroll
      for (int column = 0; column < columns; column += kOSlab) {
        copy_out(tile, rows + column * kWarpgroupRows, first + column);
      }
      cute::tma_store_arrive();
    }
  }

  __device__ __forceinline__ void write(const Tile& tile, const Output& o,
                                        const float (&inverse)[2], const bool (&empty)[2]) {
    write_columns<kHeadDimVPadded>(tile, o, 0, inverse, empty);
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
      const float mean = params.lse && params.k_mean.data ? mean_score(tile, row) : 0.f;
      if (params.lse && lane() % 4 == 0 && row < seqlen_q(tile)) {
        const int64_t head = lse_begin(tile);
        params.lse[head + row] =
            empty[r] ? -INFINITY
                     : (softmax.reference(r) + log2_approx(sum) + mean) * 0.69314718056f;
      }
    }
    descale(tile, o, inverse, empty);
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
      shared.k_full[stage].init(kGroups + 1);
      shared.v_full[stage].init(kTransposers);
      shared.k_empty[stage].init(kConsumers * kWarpgroup / 32);
      shared.v_empty[stage].init(kConsumers * kWarpgroup / 32);
      shared.v_rows_full[stage].init(1);
      shared.v_rows_empty[stage].init(kTransposers);
    }
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
    } else if (threadIdx.x >= kWarpgroup - 32 * kTransposers) {
      produce_transposed_v(params, shared);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    Consumer consumer{params, shared, warpgroup - 1};
    consumer.run();
  }
}

}  // namespace fagen_fwd_e4m3_d128_causal_m128n160_nointer_vrows_sblock_pm1_pc64_kernel

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
  const void* q;            // e4m3 (batch, seqlen_q, heads, 128)
  const void* k;            // e4m3 (batch, seqlen_k, kv_heads, 128)
  const void* v;            // e4m3 (batch, seqlen_k, kv_heads, 128)
  const void* q_descale;    // fp32 (batch or 1, heads or 1, ceil(seqlen_q / 64)): what q is to be
                            // multiplied by, finite and above 0
  const void* k_descale;  // fp32 (batch or 1, kv_heads or 1, ceil(seqlen_k / 64)): what k is to be
                          // multiplied by, finite and above 0
  const void* v_descale;  // fp32 (batch or 1, kv_heads or 1, 128 or 1): what columns of v are to be
                          // multiplied by, finite and above 0; null: 1
  const void* v_mean;  // fp32 (batch or 1, kv_heads or 1, 128 or 1): what was taken off columns of
                       // v before they were quantised; null: nothing
  const void* k_mean;  // fp32 (batch or 1, kv_heads or 1, 128 or 1): what was taken off columns of
                       // k before they were quantised; null: nothing
  void* out;           // bf16 (batch, seqlen_q, heads, 128): zeros in a row that sees no key
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
int fagen_fwd_e4m3_d128_causal_m128n160_nointer_vrows_sblock_pm1_pc64(
    const struct FagenForwardArgs* args, void* stream);
// How many bytes of workspace a call of these sizes needs; -1 where args is null, or a call of such
// sizes is refused. They are zeros before the first call, and each call leaves them so; calls that
// may run at once need one each.
int64_t fagen_fwd_e4m3_d128_causal_m128n160_nointer_vrows_sblock_pm1_pc64_workspace(
    const struct FagenForwardArgs* args);
const char* fagen_fwd_e4m3_d128_causal_m128n160_nointer_vrows_sblock_pm1_pc64_message(int status);
const struct FagenKernelInfo*
fagen_fwd_e4m3_d128_causal_m128n160_nointer_vrows_sblock_pm1_pc64_info(void);

}  // extern "C"

// ---- The host's side -------------------------------------------------------------------------

#include "fagen_host.h"
#if FAGEN_HOST_H != 0xa95921b9
#error "the fagen_host.h beside this kernel is that of another version of fagen"
#endif

namespace fagen_fwd_e4m3_d128_causal_m128n160_nointer_vrows_sblock_pm1_pc64_host {

using namespace fagen_fwd_e4m3_d128_causal_m128n160_nointer_vrows_sblock_pm1_pc64_kernel;
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
    "a tensor does not begin at a multiple of 16 bytes (q_descale: 4, k_descale: 4, v_descale: 4, v_mean: 4, k_mean: 4, lse: 4)",
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
           check_tensor(a.q, 1, true, false, kMostStride, 128,
                        {{a.batch, a.q_stride_batch},
                         {a.seqlen_q, a.q_stride_seq},
                         {a.heads, a.q_stride_head}}),
           check_tensor(a.k, 1, true, false, kMostStride, 128,
                        {{a.batch, a.k_stride_batch},
                         {a.seqlen_k, a.k_stride_seq},
                         {a.kv_heads, a.k_stride_head}}),
           check_tensor(a.v, 1, true, false, kMostStride, 128,
                        {{a.batch, a.v_stride_batch},
                         {a.seqlen_k, a.v_stride_seq},
                         {a.kv_heads, a.v_stride_head}}),
           check_tensor(a.q_descale, 4, false, false, 1073741824, ceil_div(a.seqlen_q, 64),
                        {{a.batch, a.q_descale_stride_batch}, {a.heads, a.q_descale_stride_head}}),
           check_tensor(
               a.k_descale, 4, false, false, 1073741824, ceil_div(a.seqlen_k, 64),
               {{a.batch, a.k_descale_stride_batch}, {a.kv_heads, a.k_descale_stride_head}}),
           !a.v_descale ? kOk
                        : check_tensor(a.v_descale, 4, false, false, 1073741824, 1,
                                       {{a.batch, a.v_descale_stride_batch},
                                        {a.kv_heads, a.v_descale_stride_head},
                                        {128, a.v_descale_stride_column}}),
           !a.v_mean ? kOk
                     : check_tensor(a.v_mean, 4, false, false, 1073741824, 1,
                                    {{a.batch, a.v_mean_stride_batch},
                                     {a.kv_heads, a.v_mean_stride_head},
                                     {128, a.v_mean_stride_column}}),
           !a.k_mean ? kOk
                     : check_tensor(a.k_mean, 4, false, false, 1073741824, 1,
                                    {{a.batch, a.k_mean_stride_batch},
                                     {a.kv_heads, a.k_mean_stride_head},
                                     {128, a.k_mean_stride_column}}),
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
  params.q_scale = {static_cast<const float*>(a.q_descale), a.q_descale_stride_batch,
                    a.q_descale_stride_head};
  params.k_scale = {static_cast<const float*>(a.k_descale), a.k_descale_stride_batch,
                    a.k_descale_stride_head};
  params.v_scale = {static_cast<const float*>(a.v_descale), a.v_descale_stride_batch,
                    a.v_descale_stride_head, a.v_descale_stride_column};
  params.v_mean = {static_cast<const float*>(a.v_mean), a.v_mean_stride_batch, a.v_mean_stride_head,
                   a.v_mean_stride_column};
  params.k_mean = {static_cast<const float*>(a.k_mean), a.k_mean_stride_batch, a.k_mean_stride_head,
                   a.k_mean_stride_column};
  params.q_rows = static_cast<const Element*>(a.q);
  params.q_stride_batch = a.q_stride_batch;
  params.q_stride_head = a.q_stride_head;
  params.q_stride_seq = a.q_stride_seq;
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
                 .type = CU_TENSOR_MAP_DATA_TYPE_UINT8,
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
                 .type = CU_TENSOR_MAP_DATA_TYPE_UINT8,
                 .element_bytes = sizeof(Element),
                 .promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B};
  if (!describe(&params.k, k)) {
    return kTensorMapRefused;
  }

  const Tensor v{.data = a.seqlen_k > 0 ? a.v : a.q,
                 .sizes = {kHeadDimV, a.seqlen_k, a.kv_heads, a.batch},
                 .strides = {a.v_stride_seq, a.v_stride_head, a.v_stride_batch},
                 .box = {kVRowsSlab, kBlockN, 1, 1},
                 .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                 .type = CU_TENSOR_MAP_DATA_TYPE_UINT8,
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

}  // namespace fagen_fwd_e4m3_d128_causal_m128n160_nointer_vrows_sblock_pm1_pc64_host

extern "C" int fagen_fwd_e4m3_d128_causal_m128n160_nointer_vrows_sblock_pm1_pc64(
    const FagenForwardArgs* args, void* stream) {
  using namespace fagen_fwd_e4m3_d128_causal_m128n160_nointer_vrows_sblock_pm1_pc64_host;
  const Status status = args ? check(*args) : kNullPointer;
  return status ? status : launch(*args, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t fagen_fwd_e4m3_d128_causal_m128n160_nointer_vrows_sblock_pm1_pc64_workspace(
    const FagenForwardArgs* args) {
  using namespace fagen_fwd_e4m3_d128_causal_m128n160_nointer_vrows_sblock_pm1_pc64_host;
  return args && !check_sizes(*args) ? workspace_bytes(*args) : -1;
}

extern "C" const char* fagen_fwd_e4m3_d128_causal_m128n160_nointer_vrows_sblock_pm1_pc64_message(
    int status) {
  using namespace fagen_fwd_e4m3_d128_causal_m128n160_nointer_vrows_sblock_pm1_pc64_host;
  constexpr int kNoKernel = 100;  // of who chooses among kernels
  return status >= 0 && status <= kLaunchFailed ? kMessages[status]
         : status == kNoKernel                  ? "no kernel computes that"
                                                : "unknown status";
}

extern "C" const FagenKernelInfo*
fagen_fwd_e4m3_d128_causal_m128n160_nointer_vrows_sblock_pm1_pc64_info(void) {
  using namespace fagen_fwd_e4m3_d128_causal_m128n160_nointer_vrows_sblock_pm1_pc64_kernel;
  static const FagenKernelInfo info = {
      sizeof(FagenKernelInfo),
      kSharedBytes,
      kThreads,
      kLaunchRegisters,
      "fwd_e4m3_d128_causal_m128n160_nointer_vrows_sblock_pm1_pc64",
      "a1b923dc3ac2aa643d79deb1c5292933c7c72f8c0e429ed4538af5c007bf4ac2"};
  return &info;
}
// sha256 of what is above: e2fa7cfd363403f1ccb3d249ddd663f93dd4705550ebd083e26b04cc86dcd93e
