// bwd_bf16_d64_full_m128n128_det_underdp_persist_post: the gradients of fused attention for Hopper
// (sm_90a). Rendered by fagen; do not edit.
//
//   P = exp(scale * q kᵀ - lse)        dv = Pᵀ dout
//   dP = dout vᵀ                       dS = P (dP - delta), delta = sum(dout * out) of a row
//   dk = scale * dSᵀ q                 dq = scale * dS k
//
// A first kernel works out delta, and a last one rounds dq. Between them a thread block has 128
// keys of one KV head and goes through all rows that see them, 128 at a time, of each query head of
// its group. dk and dv stay in registers; dq is added up in global memory, in fp32.
//
// S and dP lie transposed, keys along the rows: so P and dS are, as they come out of one GEMM, the
// register operands of the next. One producer warp loads by TMA, and two add dq up by TMA. Another
// one rounds dq once it is done. 2 consumer warpgroups of 64 keys each multiply by WGMMA.
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

namespace fagen_bwd_bf16_d64_full_m128n128_det_underdp_persist_post_kernel {

// ---- The schedule ----------------------------------------------------------------------------

using Element = __nv_bfloat16;
using Pair = __nv_bfloat162;
using OutElement = Element;

constexpr int kWarpgroup = 128;
constexpr int kWarpgroupRows = 64;  // the M of every wgmma

constexpr int kHeadDim = 64;
constexpr int kHeadDimV = 64;
constexpr int kHeadDimPadded = 64;  // in shared memory, padded with zeros
constexpr int kHeadDimVPadded = 64;
constexpr int kBlockM = 128;   // rows of a step
constexpr int kBlockN = 128;   // keys of a thread block
constexpr int kCluster = 1;    // thread blocks of neighbouring keys, which have the same rows
constexpr int kStages = 2;     // Q buffers
constexpr int kDoStages = 2;   // dO buffers
constexpr int kDsStages = 2;   // dS buffers
constexpr int kConsumers = 2;  // warpgroups of 64 keys

constexpr int kThreads = 384;
constexpr int kLaunchRegisters = 168;
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;
constexpr int kRowThreads = 256;  // of the kernels before and after
constexpr int kRowLanes = 8;      // of those, that share a row

constexpr int kQkSlab = 64;
constexpr int kVSlab = 64;
constexpr int kDsSlab = 64;
constexpr int kQkSwizzleBits = 3;
constexpr int kVSwizzleBits = 3;
constexpr int kDsSwizzleBits = 3;
constexpr auto kQkDescriptor = cute::SM90::GMMA::LayoutType::B128;
constexpr auto kVDescriptor = cute::SM90::GMMA::LayoutType::B128;
constexpr auto kDsDescriptor = cute::SM90::GMMA::LayoutType::B128;
constexpr int kStepK = 16;  // the K of every wgmma

constexpr int64_t kL2Share = 20971520;  // bytes of the L2 cache for Q, dO and dQ

constexpr int kTileStages = 2;    // tiles drawn and not yet done
constexpr int kTileReaders = 10;  // warps that multiply, and threads that add dQ up

constexpr int kDqColumns = 64;    // that a warpgroup computes, of 64 rows of its own
constexpr int kDqRowStep = 64;    // rows between the parts of dQ of two warpgroups
constexpr int kDqColumnStep = 0;  // and columns; of both one is 0
constexpr int kDqParts = 2;       // warpgroups that compute dQ
constexpr int kDqAdders = 2;      // threads that add it up, in turns
constexpr int kDqSlices = 1;      // in which each hands it on
constexpr int kLine = 128;        // of the L2 cache: additions that begin within one take longer

constexpr int kPieces = 6;  // of sums of dQ, on their way to the warp that rounds them

// A thread's part of a warpgroup's accumulators.
using Scores = float[kBlockM / 2];  // S, dP: 64 keys by kBlockM rows
using KeyGradient = float[kHeadDimPadded / 2];
using ValueGradient = float[kHeadDimVPadded / 2];
using QueryGradient = float[kDqColumns / 2];
using Packed = uint32_t[kBlockM / 4];  // P, dS in bf16

using Barrier = cutlass::arch::ClusterBarrier;
using TransactionBarrier = cutlass::arch::ClusterTransactionBarrier;

template <class Integer>
__host__ __device__ constexpr Integer ceil_div(Integer a, Integer b) {
  return (a + b - 1) / b;
}

// kBlockN keys of one KV head with a share of its query heads, and the blocks first … last - 1 of
// kBlockM rows that see some of them. Of the full ones every row sees all of its own.
struct Tile {
  int first_key, kv_head, batch;
  int share;  // of the group's query heads
  int first_head, last_head, first, full_first, last;
};

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

// Rows (batch, seqlen, heads, columns) in global memory.
template <class T>
struct Rows {
  T* data;
  int64_t stride_batch, stride_seq, stride_head;

  __device__ __forceinline__ T* at(int batch, int row, int head) const {
    return data + batch * stride_batch + row * stride_seq + head * stride_head;
  }
};

// Numbers (batch, heads, seqlen) in global memory.
struct Numbers {
  const float* data;
  int64_t stride_batch, stride_head;

  __device__ __forceinline__ const float* of(int batch, int head) const {
    return data + batch * stride_batch + head * stride_head;
  }
};

struct Params;
using Lengths = Params;  // the same for all sequences

// Of a row tensor cores add two numbers to products of its: as sums of eight bf16, core matrices of
// eight rows side by side, first of one number and then of the other.
using Statistics = uint4[2 * kBlockM];

__device__ constexpr int lse_of(int row) {
  return row / 8 * 16 + row % 8;
}
__device__ constexpr int delta_of(int row) {
  return lse_of(row) + 8;
}

// A number as the sum of three bf16, which is all of its 24 bits, and of five zeros.
__device__ __forceinline__ uint4 in_parts(float number) {
  uint32_t part[3];
#pragma unroll
  for (uint32_t& bits : part) {
    bits = __float_as_uint(number) & 0xffff0000;
    number -= __uint_as_float(bits);
  }
  return {part[1] | part[0] >> 16, part[2] >> 16, 0, 0};
}

// What a share of a group's query heads gives to dV and dK of a tile, where several thread blocks
// have one each.
struct alignas(kLine) KeyBlock {
  float dv[kBlockN * kHeadDimVPadded];  // in the order of the threads' accumulators
  float dk[kBlockN * kHeadDimPadded];
};

// What there is of a block of rows in the workspace.
struct alignas(kLine) RowBlock {
  float dq[kBlockM * kHeadDimPadded];  // in the order of the threads' accumulators
  Statistics statistics;  // -LSE / scale, and -delta; where a row sees no key -2^127 and 0, so that
                          // its P is 0
  uint32_t added;         // parts of dQ that are there
  uint32_t drawn;         // of the very first: tiles that thread blocks have drawn
  uint32_t rounded;  // of the very first: blocks of rows that warps have drawn to round their dQ
  uint32_t done;  // of sections of heads, in as many records: threads that have added a tile's dQ
};
static_assert(sizeof(RowBlock) == 36992, "the workspace outgrew the plan's formula");

// Of the sums of dQ, in the order of a warpgroup's accumulators: sixteen columns of 64 rows.
using Piece = float4[2 * kWarpgroup];

// Tiles lie as slabs: columns of one swizzle span, all rows of a slab together.
struct SharedStorage {
  alignas(1024) Element k[kBlockN * kHeadDimPadded];
  alignas(1024) Element v[kBlockN * kHeadDimVPadded];
  alignas(1024) Element q[kStages][kBlockM * kHeadDimPadded];
  alignas(1024) Element dout[kDoStages][kBlockM * kHeadDimVPadded];
  alignas(1024) Element ds[kDsStages][kBlockN * kBlockM];  // transposed: keys along the rows
  alignas(1024) float dq[kBlockM * kHeadDimPadded / kCluster / kDqSlices];
  alignas(1024) Piece pieces[kPieces];
  alignas(1024) Statistics statistics[kStages];
  alignas(1024) TransactionBarrier q_full[kStages];  // with K where a tile begins
  TransactionBarrier dout_full[kDoStages];           // and with V
  Barrier q_empty[kStages];
  Barrier dout_empty[kDoStages];
  Barrier dq_full[kDqAdders][kDqParts];  // for each that adds, so that none misses a phase
  Barrier dq_empty[kDqParts];
  Barrier dk_full;  // of what leaves by way of dQ's space
  Barrier dv_full;  // and dS's
  Barrier dv_empty;
  TransactionBarrier piece_full[kPieces];
  uint32_t no_more_tiles;  // 1 once the last one is drawn
  Barrier tile_full[kTileStages];
  Barrier tile_empty[kTileStages];
  Tile tiles[kTileStages];  // in work, and next
};
constexpr int kSharedBytes = sizeof(SharedStorage);
static_assert(kSharedBytes <= 230400, "the layout outgrew the plan's ledger");

struct Params {
  CUtensorMap q, k, v, dout, dk, dv;
  Rows<const Element> out_rows, dout_rows;
  Rows<Element> dq_rows, dk_rows, dv_rows;
  Numbers lse;
  Numbers dlse;          // dlse.data may be null
  RowBlock* row_blocks;  // (batch, heads, m_blocks)
  KeyBlock* key_blocks;  // (batch, kv_heads, blocks of keys, shares)
  int heads, kv_heads;
  int group;        // query heads of a KV head
  int shares;       // in which a group is dealt to thread blocks
  int share_heads;  // heads of one; the last may have fewer
  int seqlen_q, seqlen_k, m_blocks, n_blocks, tiles;
  int row_blocks_count;  // of all heads
  int early_blocks;      // the first of those, whose dQ may be rounded before all tiles are done
  FastDivisor m_blocks_divisor, heads_divisor;
  FastDivisor section_blocks;  // of rows of a section
  int sections;
  FastDivisor section_tiles;  // of heads whose Q, dO and dQ share the L2 cache
  FastDivisor section_heads, last_section_heads;
  FastDivisor batch_shares;    // shares of all groups of a batch
  FastDivisor shares_divisor;  // and of one
  float scale;                 // of dQ and dK
  float scale_log2;            // of S, times log2(e)
  int first_head;  // of a launch of a kernel before or after, whose grid may not hold all of them
  int first_batch;
  int cut;                   // blocks of rows that have tiles of their own
  int cut_keys;              // that rows see which have tiles of their own
  int kept_keys;             // of whose dK and dV there are parts
  int flat_shares;           // of all groups of all batches
  int first_mixed;           // block of keys of the other tiles from there on
  int first_paired;          // where tiles of rows before the cut begin
  FastDivisor paired_heads;  // of a block of keys, from there on

  __device__ __forceinline__ RowBlock& row_block(int batch, int head, int m_block) const {
    const int flat_head =
        batch * heads + head;  // each has a record: no memory has room for more than an int counts
    return row_blocks[int64_t(flat_head) * m_blocks + m_block];
  }

  __device__ __forceinline__ KeyBlock* key_blocks_of(int batch, int kv_head, int n_block) const {
    const int flat_head = batch * kv_heads + kv_head;
    return key_blocks + (int64_t(flat_head) * kCluster * n_blocks + n_block) * shares;
  }
};

__device__ __forceinline__ int lane() {
  return threadIdx.x % 32;
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const Pair pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

__device__ __forceinline__ float2 unpack(uint32_t pair) {
  return __bfloat1622float2(reinterpret_cast<const Pair&>(pair));
}

// Hardware barriers, by number; 0 is __syncthreads.
enum NamedBarrier { kAllConsumers = 1 };

__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
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

// ---- Tiles -----------------------------------------------------------------------------------

// The keys first … last - 1 that a row sees: all.
struct Keys {
  int first, last;
};

__host__ __device__ __forceinline__ Keys seen_by(const Lengths& lengths, int) {
  return {0, lengths.seqlen_k};
}

// The first row whose keys end after a key; seqlen_q if there is none.
__device__ __forceinline__ int first_row_past(const Lengths& lengths, int key) {
  return key < lengths.seqlen_k ? 0 : lengths.seqlen_q;
}

// The first block of keys that a block of rows sees.
__device__ __forceinline__ int first_tile_of(const Lengths&, int) {
  return 0;
}

// Where the blocks of rows end that see a tile's keys: all rows see the first key.
__device__ __forceinline__ void find_last(Tile& tile, const Lengths&, int, const int& m_blocks) {
  tile.last = m_blocks;
}

// How many blocks of keys a block of rows sees any of: so many parts its dQ has.
__device__ __forceinline__ int tiles_of(const Lengths& lengths, int m_block) {
  const int last_row = min((m_block + 1) * kBlockM, lengths.seqlen_q) - 1;
  return max(0, ceil_div(seen_by(lengths, last_row).last, kCluster * kBlockN) -
                    first_tile_of(lengths, m_block));
}

// The blocks of rows that see some of the keys from first_key on, which thread blocks of a cluster
// share; of the full ones every row sees all of a thread block's own.
__device__ __forceinline__ void find_blocks(Tile& tile, const Lengths& lengths, int first_key,
                                            const int& m_blocks) {
  const int first_row = first_row_past(lengths, first_key);
  tile.first = first_row < lengths.seqlen_q ? first_row / kBlockM : m_blocks;
  tile.full_first = ceil_div(first_row_past(lengths, tile.first_key + kBlockN - 1), kBlockM);
  find_last(tile, lengths, first_key, m_blocks);
}

// The keys that most rows see come first; heads in sections, so that what their tiles read stays in
// the L2 cache. Where rows are cut in two, tiles of those before the cut begin among the last of
// the others, which are as long, or behind them.
__device__ __forceinline__ Tile tile_of(const Params& params, int index) {
  const int paired = index - params.first_paired;
  const bool is_mixed = paired >= 0;
  const int section =
      is_mixed ? params.sections - 1 : min(params.section_tiles.divide(index), params.sections - 1);
  const FastDivisor& heads = is_mixed                        ? params.paired_heads
                             : section + 1 < params.sections ? params.section_heads
                                                             : params.last_section_heads;
  const int rank = is_mixed ? paired : index - section * params.section_tiles.value;
  int n_block = heads.divide(rank);
  int flat_share = rank - n_block * heads.value;
  const bool is_before = is_mixed && flat_share < params.flat_shares;
  if (!is_before) {
    flat_share += section * params.section_heads.value;
    if (is_mixed) {
      flat_share -= params.flat_shares;
      n_block += params.first_mixed;
    }
  }
  Tile tile;
  const int first_key = n_block * kCluster * kBlockN;
  tile.first_key = first_key;
  tile.batch = params.batch_shares.divide(flat_share);
  const int share = flat_share - tile.batch * params.batch_shares.value;
  tile.kv_head = params.shares_divisor.divide(share);
  tile.share = share - tile.kv_head * params.shares_divisor.value;
  tile.first_head = tile.kv_head * params.group + tile.share * params.share_heads;
  tile.last_head = min(tile.first_head + params.share_heads, (tile.kv_head + 1) * params.group);
  find_blocks(tile, params, first_key, params.m_blocks);
  if (is_before) {
    tile.share += params.shares_divisor.value;
    tile.last = min(tile.last, params.cut);
  } else {
    tile.first = min(max(tile.first, params.cut), tile.last);
  }
  tile.full_first = min(max(tile.full_first, tile.first), tile.last);
  return tile;
}

__device__ __forceinline__ const Lengths& lengths_of(const Params& params, const SharedStorage&) {
  return params;
}

// Of a tile's rows of a head.
__device__ __forceinline__ RowBlock& row_block_of(const Params& params, const SharedStorage&,
                                                  const Tile& tile, int head, int block) {
  return params.row_block(tile.batch, head, block);
}

// The tiles that the producer draws, for one of the others.
struct Tiles {
  SharedStorage& shared;
  RingPosition<kTileStages> next;

  // The next tile, which stays where it is until whoever took it arrives; none where its first_key
  // is negative.
  __device__ __forceinline__ const Tile& look() const {
    shared.tile_full[next.stage].wait(next.phase);
    return shared.tiles[next.stage];
  }

  __device__ __forceinline__ Barrier& take() {
    Barrier& empty = shared.tile_empty[next.stage];
    next.advance();
    return empty;
  }
};

// Blocks of rows in the order of a tile's steps: from the last to the first. All tiles of a head
// begin with the same, so that they add to its dQ one after another.
__device__ __forceinline__ int block_of(const Tile& tile, int step) {
  return tile.last - 1 - step;
}

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

// ---- Tensor cores ----------------------------------------------------------------------------

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

// For a tile whose columns are M or N, as it lies: from slab to slab of `rows` rows.
template <int rows, int slab>
__device__ __forceinline__ Descriptor along_columns(const Element* tile,
                                                    cute::SM90::GMMA::LayoutType layout) {
  return descriptor<slab>(tile, layout, rows * slab * sizeof(Element));
}

// From such a descriptor to that of the k-th row.
template <int slab>
__device__ constexpr uint32_t row_offset(int k) {
  return k * slab * sizeof(Element) >> 4;
}

// S or dP, to begin with: of numbers of rows.
template <bool accumulate>
__device__ __forceinline__ void wgmma_statistics(float (&c)[64], const uint32_t* a, Descriptor b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{ %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63 }, "
      "{ %64, %65, %66, %67 }, %68, %69, 1, 1, 0;"
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

// S, or dP: keys by rows, both operands as they lie.
template <bool accumulate>
__device__ __forceinline__ void wgmma_scores(float (&c)[64], Descriptor a, Descriptor b) {
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

// dV, or dK if it is as wide: P by dO, dS by Q.
template <bool accumulate>
__device__ __forceinline__ void wgmma_gradient(float (&c)[32], const uint32_t* a, Descriptor b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{ %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31 }, "
      "{ %32, %33, %34, %35 }, %36, %37, 1, 1, 1;"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]),
        "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]),
        "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]),
        "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()), "n"(accumulate ? 1 : 0));
}

// dQ: dS by K, dS as it lies transposed.
template <bool accumulate>
__device__ __forceinline__ void wgmma_dq(float (&c)[32], Descriptor a, Descriptor b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{ %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31 }, "
      "%32, %33, %34, 1, 1, 1, 1;"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]),
        "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]),
        "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]),
        "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
      : "l"(a.bits()), "l"(b.bits()), "n"(accumulate ? 1 : 0));
}

// Adds up what shares of a group found of 64 rows of dK or dV, always in their order, and rounds
// that.
template <int columns, int padded>
__device__ __forceinline__ void sum_rows(const Params& params, const float* first,
                                         const Rows<Element>& to, int key, int head, int batch,
                                         float scale) {
  constexpr int kShare = sizeof(KeyBlock) / sizeof(float4);
  const int shares = key < params.cut_keys ? params.shares : params.shares_divisor.value;
  __shared__ uint32_t rounded[kWarpgroupRows][padded / 2 + 4];
  for (int i = threadIdx.x; i < kWarpgroupRows * padded / 4; i += kRowThreads) {
    // four neighbours of a thread's accumulator, as of dQ
    const int thread = i % kWarpgroup, row = thread / 32 * 16 + thread % 32 / 4,
              pair = i / kWarpgroup * 4 + thread % 4;
    float4 sum = {};
    for (int share = 0; share < shares; ++share) {
      const float4 x = reinterpret_cast<const float4*>(first)[int64_t(share) * kShare + i];
      sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
    }
    rounded[row][pair] = pack(sum.x * scale, sum.y * scale);
    rounded[row + 8][pair] = pack(sum.z * scale, sum.w * scale);
  }
  __syncthreads();
  constexpr int kLoads = columns * sizeof(Element) / 16;  // of a row
  for (int i = threadIdx.x; i < kWarpgroupRows * kLoads; i += kRowThreads) {
    const int row = i / kLoads;
    if (key + row < params.seqlen_k) {
      reinterpret_cast<uint4*>(to.at(batch, key + row, head))[i % kLoads] =
          *reinterpret_cast<const uint4*>(&rounded[row][i % kLoads * 4]);
    }
  }
}

__global__ void __launch_bounds__(kRowThreads) sum_shares(const __grid_constant__ Params params) {
  const int key = blockIdx.x * kWarpgroupRows, head = params.first_head + blockIdx.y,
            batch = params.first_batch + blockIdx.z;
  const KeyBlock& first = *params.key_blocks_of(batch, head, key / kBlockN);
  const int row = key % kBlockN;
  sum_rows<kHeadDimV, kHeadDimVPadded>(params, first.dv + row * kHeadDimVPadded, params.dv_rows,
                                       key, head, batch, 1.f);
  __syncthreads();  // both round by way of the same shared memory
  sum_rows<kHeadDim, kHeadDimPadded>(params, first.dk + row * kHeadDimPadded, params.dk_rows, key,
                                     head, batch, params.scale);
}

// ---- Rows, before and after ------------------------------------------------------------------

// A block of rows of a head.
struct BlockOfRows {
  int batch, head, m_block;

  __device__ __forceinline__ RowBlock& record(const Params& params) const {
    return params.row_block(batch, head, m_block);
  }

  __device__ __forceinline__ const Params& lengths(const Params& params) const { return params; }

  template <class T>
  __device__ __forceinline__ T* row(const Rows<T>& rows, int query) const {
    return rows.at(batch, query, head);
  }

  __device__ __forceinline__ float number(const Numbers& numbers, int query) const {
    return numbers.of(batch, head)[query];
  }
};

// The one that a thread block before or after has.
__device__ __forceinline__ BlockOfRows own_block_of_rows(const Params& params) {
  const int m_block = blockIdx.x, head = params.first_head + blockIdx.y,
            batch = params.first_batch + blockIdx.z;
  return {batch, head, m_block};
}

// Sums of dQ begin at none.
__device__ __forceinline__ void clear(RowBlock& record) {
  if (threadIdx.x == 0) {
    record.added = 0;
    record.drawn = 0;
    record.rounded = 0;
    record.done = 0;
  }
}

// Each row's delta = sum of dO * O, less its dLSE, and its LSE.
__device__ __forceinline__ void prepare(const Params& params, const BlockOfRows& own,
                                        RowBlock& record) {
  constexpr int kLoad = 16 / sizeof(Element);  // elements
  const int column = threadIdx.x % kRowLanes * kLoad, seqlen_q = own.lengths(params).seqlen_q;
#pragma unroll
  for (int row = threadIdx.x / kRowLanes; row < kBlockM; row += kRowThreads / kRowLanes) {
    const int query = own.m_block * kBlockM + row;
    float delta = 0.f;
    if (query < seqlen_q && column < kHeadDimV) {
      const uint4 a = *reinterpret_cast<const uint4*>(own.row(params.out_rows, query) + column);
      const uint4 b = *reinterpret_cast<const uint4*>(own.row(params.dout_rows, query) + column);
#pragma unroll
      for (int i = 0; i < kLoad / 2; ++i) {
        const float2 x = unpack(reinterpret_cast<const uint32_t*>(&a)[i]);
        const float2 y = unpack(reinterpret_cast<const uint32_t*>(&b)[i]);
        delta = fmaf(x.y, y.y, fmaf(x.x, y.x, delta));
      }
    }
#pragma unroll
    for (int other = kRowLanes / 2; other > 0; other /= 2) {
      delta += __shfl_xor_sync(0xffffffff, delta, other);
    }
    if (threadIdx.x % kRowLanes == 0) {
      const float lse = query < seqlen_q ? own.number(params.lse, query) : -INFINITY;
      if (lse > -INFINITY && params.dlse.data) {
        delta -= own.number(params.dlse, query);
      }
      const float reference = lse > -INFINITY ? lse * 1.44269504089f : INFINITY;
      const float subtracted = reference / params.scale_log2;
      record.statistics[lse_of(row)] = in_parts(subtracted > 0x1p127f ? -0x1p127f : -subtracted);
      record.statistics[delta_of(row)] = in_parts(lse > -INFINITY ? -delta : 0.f);
    }
  }
}

// Before the main kernel.
__global__ void __launch_bounds__(kRowThreads) prepare_rows(const __grid_constant__ Params params) {
  const BlockOfRows own = own_block_of_rows(params);
  RowBlock& record = own.record(params);
  clear(record);
  prepare(params, own, record);
}

// A block of rows of all, in the order of their records: the first early_blocks are those of whole
// sections.
__device__ __forceinline__ BlockOfRows block_of_rows(const Params& params, int index) {
  const int flat_head = params.m_blocks_divisor.divide(index),
            batch = params.heads_divisor.divide(flat_head);
  return {batch, flat_head - batch * params.heads, index - flat_head * params.m_blocks};
}

// The section of a KV head of all; the record of that number has its counter.
__device__ __forceinline__ int section_of(const Params& params, int flat_kv_head) {
  return min(params.section_heads.divide(flat_kv_head), params.sections - 1);
}

// After the main kernel: scale and round those sums of dq that were not meanwhile, by way of shared
// memory.
__global__ void __launch_bounds__(kRowThreads) round_dq(const __grid_constant__ Params params) {
  for (int index = min(int(params.row_blocks->rounded), params.early_blocks) + blockIdx.x;
       index < params.row_blocks_count; index += gridDim.x) {
    const BlockOfRows own = block_of_rows(params, index);
    const float4* sums = reinterpret_cast<const float4*>(own.record(params).dq);
    const bool seen =
        tiles_of(own.lengths(params), own.m_block) > 0;  // nobody has sums of rows that see no key
    __shared__ uint32_t rounded[kBlockM][kHeadDimPadded / 2 + 4];
    for (int i = threadIdx.x; i < kBlockM * kHeadDimPadded / 4; i += kRowThreads) {
      const int thread = i % kWarpgroup, eight = i / kWarpgroup % (kDqColumns / 8),
                warpgroup = i / (kWarpgroup * kDqColumns / 8);
      // four neighbours of a thread's accumulator: two columns of a row, and of that eight below
      const int row = warpgroup * kDqRowStep + thread / 32 * 16 + thread % 32 / 4;
      const int pair = warpgroup * kDqColumnStep / 2 + eight * 4 + thread % 4;
      const float4 sum = seen ? sums[i] : float4{};
      rounded[row][pair] = pack(sum.x * params.scale, sum.y * params.scale);
      rounded[row + 8][pair] = pack(sum.z * params.scale, sum.w * params.scale);
    }
    __syncthreads();
    constexpr int kLoads = kHeadDim * sizeof(Element) / 16;  // of a row
    for (int i = threadIdx.x; i < kBlockM * kLoads; i += kRowThreads) {
      const int row = i / kLoads, query = own.m_block * kBlockM + row;
      if (query < own.lengths(params).seqlen_q) {
        reinterpret_cast<uint4*>(own.row(params.dq_rows, query))[i % kLoads] =
            *reinterpret_cast<const uint4*>(&rounded[row][i % kLoads * 4]);
      }
    }
    __syncthreads();  // what is rounded next takes the same space
  }
}

// ---- Loading ---------------------------------------------------------------------------------

// Copies tiles from global to shared memory. Used by a single thread.
struct Loader {
  const Params& params;
  SharedStorage& shared;

  // One box per slab; rows past the sequence and columns past the head dim are filled with zeros.
  template <int columns, int rows, int slab>
  __device__ __forceinline__ void copy(const CUtensorMap& map, TransactionBarrier& full,
                                       Element* tile, int row, int head, int batch,
                                       cute::TMA::CacheHintSm90 hint) {
#pragma unroll 1  // few registers
    for (int column = 0; column < columns; column += slab) {
      cute::SM90_TMA_LOAD_4D::copy(&map, reinterpret_cast<uint64_t*>(&full),
                                   static_cast<uint64_t>(hint), tile + column * rows, column, row,
                                   head, batch);
    }
  }

  // A tile's keys, which nobody needs again.
  template <int columns, int slab>
  __device__ __forceinline__ void copy_keys(const CUtensorMap& map, TransactionBarrier& full,
                                            Element* to, const Tile& tile) {
    copy<columns, kBlockN, slab>(map, full, to, tile.first_key, tile.kv_head, tile.batch,
                                 cute::TMA::CacheHintSm90::EVICT_FIRST);
  }

  // A block of rows, which tiles of other keys need too.
  template <int columns, int slab>
  __device__ __forceinline__ void copy_rows(const CUtensorMap& map, TransactionBarrier& full,
                                            Element* to, const Tile& tile, int head, int block) {
    copy<columns, kBlockM, slab>(map, full, to, block * kBlockM, head, tile.batch,
                                 cute::TMA::CacheHintSm90::EVICT_LAST);
  }

  static constexpr uint32_t kQBytes = sizeof(SharedStorage::q[0]) + sizeof(Statistics);
  static constexpr uint32_t kDoutBytes = sizeof(SharedStorage::dout[0]);

  // Q of a block of rows, and their statistics; the barrier waits for so many bytes.
  __device__ __forceinline__ void load_q(RingPosition<kStages>& q, const Tile& tile, int head,
                                         int block, uint32_t bytes) {
    const RowBlock& rows = row_block_of(params, shared, tile, head, block);
    shared.q_empty[q.stage].wait(q.phase ^ 1);
    shared.q_full[q.stage].arrive_and_expect_tx(bytes);
    copy_rows<kHeadDimPadded, kQkSlab>(params.q, shared.q_full[q.stage], shared.q[q.stage], tile,
                                       head, block);
    cute::SM90_BULK_COPY_G2S::copy(rows.statistics,
                                   reinterpret_cast<uint64_t*>(&shared.q_full[q.stage]),
                                   shared.statistics[q.stage], sizeof(Statistics));
  }

  // And dO.
  __device__ __forceinline__ void load_dout(RingPosition<kDoStages>& dout, const Tile& tile,
                                            int head, int block, uint32_t bytes) {
    shared.dout_empty[dout.stage].wait(dout.phase ^ 1);
    shared.dout_full[dout.stage].arrive_and_expect_tx(bytes);
    copy_rows<kHeadDimVPadded, kVSlab>(params.dout, shared.dout_full[dout.stage],
                                       shared.dout[dout.stage], tile, head, block);
  }

  RingPosition<kStages> q;
  RingPosition<kDoStages> dout;
  RingPosition<kTileStages> passed_on;

  // K and V, which the barriers of a tile's first Q and dO wait for too. All have let go of those
  // of the tile before once its last dO has been read.
  __device__ __forceinline__ void load_keys(const Tile& tile) {
    shared.dout_empty[(dout.stage + kDoStages - 1) % kDoStages].wait(dout.phase ^
                                                                     (dout.stage == 0));
    copy_keys<kHeadDimPadded, kQkSlab>(params.k, shared.q_full[q.stage], shared.k, tile);
    copy_keys<kHeadDimVPadded, kVSlab>(params.v, shared.dout_full[dout.stage], shared.v, tile);
  }

  // The number of a tile that no thread block has drawn yet. Without rows nobody has set the
  // counter to 0, and there is a thread block for each tile.
  __device__ __forceinline__ int draw(int without) const {
    return params.m_blocks > 0 ? int(atomicAdd(&params.row_blocks->drawn, 1u)) : without;
  }

  // Draws tiles, passes them on, and loads what they need. All are drawn, the first ones too: a
  // tile waits for parts of dQ of those drawn before it, which must be in work.
  __device__ __forceinline__ void run() {
    for (int index = draw(blockIdx.x); index < params.tiles;) {
      const Tile tile = tile_of(params, index);
      pass_on(tile);
      index = load(tile);
    }
    *const_cast<volatile uint32_t*>(&shared.no_more_tiles) = 1;
    Tile none;
    none.first_key = -1;
    pass_on(none);
  }

  __device__ __forceinline__ void pass_on(const Tile& tile) {
    shared.tile_empty[passed_on.stage].wait(passed_on.phase ^ 1);
    shared.tiles[passed_on.stage] = tile;
    shared.tile_full[passed_on.stage].arrive();
    passed_on.advance();
  }

  // All of a tile; returns the number of its successor, which is drawn before the last step is
  // loaded: this far ahead of the consumers nobody waits for the answer.
  __device__ __forceinline__ int load(const Tile& tile) {
    const int steps = tile.last - tile.first;
    if (steps <= 0) {
      return draw(params.tiles);
    }
    int drawn = 0;
    for (int head = tile.first_head; head < tile.last_head; ++head) {
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        const bool first = head == tile.first_head && step == 0;
        if (head + 1 == tile.last_head && step + 1 == steps) {
          drawn = draw(params.tiles);
        }
        const int block = block_of(tile, step);
        load_q(q, tile, head, block, kQBytes + first * sizeof(shared.k));
        load_dout(dout, tile, head, block, kDoutBytes + first * sizeof(shared.v));
        if (first) {  // behind Q and dO, for which there is room while the tile before is in work
          load_keys(tile);
        }
        q.advance();
        dout.advance();
      }
    }
    return drawn;
  }
};

// ---- Storing dK and dV -----------------------------------------------------------------------

// One gradient of a tile, once all consumers have rounded their rows; returns when its space is
// free. Where a group is shared out they have kept its parts themselves.
template <int columns, int slab>
__device__ __forceinline__ void store_gradient(const Params& params, const CUtensorMap& map,
                                               Barrier& full, uint32_t phase, const Element* space,
                                               const Tile& tile) {
  full.wait(phase);
#pragma unroll 1  // few registers
  for (int column = 0; column < columns && tile.first_key >= params.kept_keys; column += slab) {
    cute::SM90_TMA_STORE_4D::copy(&map, space + column * kBlockN, column, tile.first_key,
                                  tile.kv_head, tile.batch);
  }
  cute::tma_store_arrive();
  cute::tma_store_wait<0>();  // the space is free
}

// Both, while consumers are at the next tile: dV out of dS's space, and dK out of dQ's, as if it
// were the dQ of one step more.
__device__ __forceinline__ void store_gradients(const Params& params, SharedStorage& shared,
                                                const Tile& tile, uint32_t phase) {
  store_gradient<kHeadDimVPadded, kVSlab>(params, params.dv, shared.dv_full, phase, shared.ds[0],
                                          tile);
  shared.dv_empty.arrive();
  store_gradient<kHeadDimPadded, kQkSlab>(params, params.dk, shared.dk_full, phase,
                                          reinterpret_cast<const Element*>(shared.dq), tile);
#pragma unroll
  for (Barrier& empty : shared.dq_empty) {
    empty.arrive();
  }
}

// ---- Adding dQ up ----------------------------------------------------------------------------

// Adds to global memory; reads shared memory as TMA does.
__device__ __forceinline__ void bulk_add(float* to, const float* from, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
      "r"(cute::cast_smem_ptr_to_uint(from)), "r"(bytes)
      : "memory");
}

// The same, of what nobody has added to yet.
__device__ __forceinline__ void bulk_store(float* to, const float* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(cute::cast_smem_ptr_to_uint(from)), "r"(bytes)
               : "memory");
}

// Until all that this thread has added is in global memory.
__device__ __forceinline__ void await_additions() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

__device__ __forceinline__ uint32_t acquire(const uint32_t* added) {
  uint32_t now;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(added) : "memory");
  return now;
}

// Until so many were counted: what they added is there, and TMA may add to it.
__device__ __forceinline__ void await_count(const uint32_t* added, uint32_t count) {
  while (int(acquire(added) - count) < 0) {
  }
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Counts one more, for what this thread has added.
__device__ __forceinline__ void release(uint32_t* added) {
  asm volatile("fence.proxy.async.global;" ::: "memory");
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(added) : "memory");
}

// Which of the parts of a block of rows a tile has: so many come before it.
__device__ __forceinline__ int turn_of(const Lengths& lengths, const Tile& tile, int block) {
  return tile.first_key / (kCluster * kBlockN) - first_tile_of(lengths, block);
}

// Adds a part of a block's dQ, or stores the first one, so that nobody has to clear the sums.
__device__ __forceinline__ void add(float* to, const float* from, int count, int turn) {
  if (turn == 0) {
    bulk_store(to, from, count * sizeof(float));
  } else {
    bulk_add(to, from, count * sizeof(float));
  }
}

// How many numbers of dQ a warpgroup has.
__device__ constexpr int dq_part(int) {
  return kWarpgroupRows * kDqColumns;
}

// The sums of a block of rows, and the counter of what has been added to them.
__device__ __forceinline__ float* sums_of(RowBlock& record) {
  return record.dq;
}
__device__ __forceinline__ uint32_t* counter_of(RowBlock& record) {
  return &record.added;
}

// Parts of dQ are added up in the order of the keys, so that their sum is the same bit for bit:
// what one tile has added is made known while the next adds. A tile waits for tiles only that were
// begun before it.
__device__ __forceinline__ void await_turn(const uint32_t* added, int turn) {
  await_count(added, turn);
}

__device__ __forceinline__ void end_turn(uint32_t* added, int) {
  await_additions();
  release(added);
}

// Used by two threads of different warps, which take turns: one waits for others, or until its
// additions are known, while the other adds. The first stores a tile's dK and dV as well.
__device__ __forceinline__ void add_dq(const Params& params, SharedStorage& shared, int adder) {
  Barrier* const full = shared.dq_full[adder];
  uint32_t phase = 0;
  int step = adder;
  Tiles tiles{shared};
  uint32_t tile_phase = 0;
  for (Tile tile; (tile = tiles.look()).first_key >= 0; tile_phase ^= 1) {
    tiles.take().arrive();
    const int steps = tile.last - tile.first;
    for (int head = tile.first_head; head < tile.last_head; ++head) {
#pragma unroll 1  // few registers
      for (; step < steps; step += kDqAdders) {
        const int block = block_of(tile, step),
                  turn = turn_of(lengths_of(params, shared), tile, block);
        RowBlock& record = row_block_of(params, shared, tile, head, block);
        float* const sums = sums_of(record);
        uint32_t* const added = counter_of(record);
        await_turn(added, turn);  // before the part is there
#pragma unroll
        for (int slice = 0; slice < kDqSlices; ++slice) {
#pragma unroll
          for (int part = 0; part < kDqParts; ++part) {
            full[part].wait(phase);
            const int begin = part * dq_part(0), count = dq_part(part) / kDqSlices;
            add(sums + begin + slice * count, shared.dq + begin / kDqSlices, count, turn);
          }
          cute::tma_store_arrive();
          cute::tma_store_wait<0>();  // it has been read
#pragma unroll
          for (int part = 0; part < kDqParts; ++part) {
            shared.dq_empty[part].arrive();
          }
        }
        phase ^= 1;
        end_turn(added, turn);
      }
      step -= steps;
    }
    if (adder == 0) {  // always the same one: none of these phases may be missed
      store_gradients(params, shared, tile, tile_phase);
    }
    if (params.early_blocks > 0) {
      release(
          &params.row_blocks[section_of(params, tile.batch * params.kv_heads + tile.kv_head)].done);
    }
  }
}

// Whether so many were counted: then what they added is there, and TMA may read it.
__device__ __forceinline__ bool has_counted(const uint32_t* added, uint32_t count) {
  if (int(acquire(added) - count) < 0) {
    return false;
  }
  asm volatile("fence.proxy.async.global;" ::: "memory");
  return true;
}

// ---- Rounding dQ meanwhile -------------------------------------------------------------------

// A warp that rounds dQ of heads that are done while others are in work, until its thread block has
// no more tiles: what is left then round_dq does sooner.
struct Rounder {
  const Params& params;
  SharedStorage& shared;
  uint32_t loaded = 0,
           taken = 0;     // pieces so far: in few registers what two places in the ring are
  int done_section = -1;  // the last that is known to be done

  enum : int { kNotYet = -1, kNoMore = -2 };

  static constexpr int kCount = sizeof(RowBlock::dq) / sizeof(Piece);
  static constexpr int kAhead =
      kCount < kPieces ? kCount : kPieces;  // pieces on their way while one is in work

  __device__ __forceinline__ void run() {
    for (int index = await_block(); index >= 0;) {
      const int next = draw();
      round(index, next);
      index = next == kNotYet ? await_block() : next;
    }
  }

  // A block of rows, once there is one; its first pieces are asked for.
  __device__ __forceinline__ int await_block() {
    int index;
    while ((index = draw()) == kNotYet) {
    }
    if (index >= 0 && is_seen(index)) {
#pragma unroll 1
      for (int number = 0; number < kAhead; ++number) {
        load(index, number);
      }
    }
    return index;
  }

  // The number of a block of rows that nobody else has, of a section that is done. Nobody who has
  // one may leave it: so one is drawn only where the next one is of such a section, and waited for
  // where others were faster and it is not.
  __device__ __forceinline__ int draw() {
    int index = kNoMore;
    if (lane() == 0 && params.early_blocks > 0) {
      uint32_t* const rounded = &params.row_blocks->rounded;
      const int next = *const_cast<const volatile uint32_t*>(rounded);
      if (next < params.early_blocks &&
          !*const_cast<const volatile uint32_t*>(&shared.no_more_tiles)) {
        index = kNotYet;
        if (is_done(params.section_blocks.divide(next))) {
          index = int(atomicAdd(rounded, 1u));
          if (index >= params.early_blocks) {
            index = kNoMore;
          }
          while (index >= 0 && !is_done(params.section_blocks.divide(index))) {
          }
        }
      }
    }
    return __shfl_sync(0xffffffff, index, 0);
  }

  __device__ __forceinline__ bool is_done(int section) {
    if (section > done_section &&
        has_counted(&params.row_blocks[section].done, kDqAdders * params.section_tiles.value)) {
      done_section = section;
    }
    return section <= done_section;
  }

  // Whether anybody has sums of it: of rows that see no key nobody has.
  __device__ __forceinline__ bool is_seen(int index) const {
    return tiles_of(params, block_of_rows(params, index).m_block) > 0;
  }

  __device__ __forceinline__ void load(int index, int number) {
    if (lane() == 0) {
      TransactionBarrier& full = shared.piece_full[loaded % kPieces];
      full.arrive_and_expect_tx(sizeof(Piece));
      cute::SM90_BULK_COPY_G2S::copy(
          reinterpret_cast<const Piece*>(params.row_blocks[index].dq)[number],
          reinterpret_cast<uint64_t*>(&full), shared.pieces[loaded % kPieces], sizeof(Piece));
    }
    ++loaded;
  }

  __device__ __forceinline__ const Piece& take() {
    const uint32_t stage = taken % kPieces;
    shared.piece_full[stage].wait(taken++ / kPieces % 2);
    return shared.pieces[stage];
  }

  // A block, whose first pieces are on their way; at the end those of the next one are.
  __device__ __forceinline__ void round(int index, int next) {
    constexpr int kColumnPieces = kDqColumns / 16;  // of a warpgroup's accumulators
    static_assert(kColumnPieces * 16 == kDqColumns, "a piece has sixteen columns");
    const BlockOfRows own = block_of_rows(params, index);
    const bool seen = is_seen(index), next_seen = next >= 0 && is_seen(next);
#pragma unroll 1  // few registers
    for (int number = 0; number < kCount; ++number) {
      const int warpgroup = number / kColumnPieces, columns = number % kColumnPieces * 16;
      const float4* sums = seen ? take() + lane() : nullptr;
      int row = own.m_block * kBlockM + warpgroup * kDqRowStep + lane() % 4 / 2 * 8 + lane() / 4;
      const int column = warpgroup * kDqColumnStep + columns + lane() % 2 * 8;
      Element* to = params.dq_rows.at(own.batch, row, own.head) + column;
#pragma unroll
      for (int warp = 0; warp < kWarpgroup / 32; ++warp) {
        const uint4 eight = seen ? gather(sums[0], sums[kWarpgroup]) : uint4{};
        if (row < params.seqlen_q) {
          *reinterpret_cast<uint4*>(to) = eight;
        }
        sums += 32;
        row += 16;
        to += 16 * params.dq_rows.stride_seq;
      }
      __syncwarp();  // all have read it
      const bool own_ahead = number + kAhead < kCount;
      if (own_ahead ? seen : next_seen) {
        load(own_ahead ? index : next, (number + kAhead) % kCount);
      }
    }
  }

  // Of two neighbours of an accumulator, each two columns of a row and of that eight below: four
  // lanes have 16 columns of two rows, of which each takes eight of one. Lanes 0 and 1 take the
  // first row, lanes 0 and 2 the first columns.
  __device__ __forceinline__ uint4 gather(const float4& near, const float4& far) const {
    const uint32_t a = rounded(near.x, near.y), b = rounded(far.x, far.y);
    const uint32_t c = rounded(near.z, near.w), d = rounded(far.z, far.w);
    const bool odd = lane() % 2, below = lane() / 2 % 2;
    const uint32_t ab = __shfl_xor_sync(0xffffffff, odd ? a : b, 1),
                   cd = __shfl_xor_sync(0xffffffff, odd ? c : d, 1);
    const uint2 above{odd ? ab : a, odd ? b : ab}, under{odd ? cd : c, odd ? d : cd};
    const uint32_t x = __shfl_xor_sync(0xffffffff, below ? above.x : under.x, 2);
    const uint32_t y = __shfl_xor_sync(0xffffffff, below ? above.y : under.y, 2);
    return below ? uint4{x, y, under.x, under.y} : uint4{above.x, above.y, x, y};
  }

  __device__ __forceinline__ uint32_t rounded(float a, float b) const {
    return pack(a * params.scale, b * params.scale);
  }
};

// ---- Multiplying -----------------------------------------------------------------------------

// A warpgroup that multiplies.
struct Consumer {
  const Params& params;
  SharedStorage& shared;
  const int warpgroup;  // 0 … kConsumers - 1

  // Rings of as many buffers go round together: registers are scarce.
  RingPosition<kStages> q;
  __device__ __forceinline__ RingPosition<kDoStages> dout() const { return q; }
  __device__ __forceinline__ RingPosition<kDsStages> ds() const { return q; }

  __device__ __forceinline__ void advance() {
    q.advance();
    count_step();
  }

  // Of dQ's buffer, which the first step finds empty, and which a tile's dK takes too.
  uint32_t dq_phase = 1;

  __device__ __forceinline__ void count_step() { dq_phase ^= 1; }

  // Who adds the dQ of a step up: steps are even and odd as the stages of dS are.
  __device__ __forceinline__ int adder() const { return ds().stage; }

  // The first of its 64 keys in the tile.
  __device__ __forceinline__ int first_row() const { return warpgroup * kWarpgroupRows; }

  // One arrival per warp, since wgmma completes per warp, for what all of its lanes have read and
  // written.
  __device__ __forceinline__ void arrive(Barrier& barrier) {
    __syncwarp();
    if (lane() == 0) {
      barrier.arrive();
    }
  }

  // Issues what S and dP - delta begin with: ones by the parts of -lse and of -delta. Before all
  // other products of a step, since one with registers on the left waits for those under way.
  __device__ __forceinline__ void issue_statistics(Scores& s, Scores& dp) {
    // halves of the 16 columns of core matrices, of which three are parts
    const uint32_t ones = lane() % 4 == 0 ? 0x3f803f80 : lane() % 4 == 1 ? 0x3f80 : 0;
    uint32_t first_half[4] = {ones, ones, 0, 0}, second_half[4] = {0, 0, ones, ones};
    const Descriptor rows =
        descriptor<16>(reinterpret_cast<const Element*>(shared.statistics[q.stage]),
                       cute::SM90::GMMA::LayoutType::INTERLEAVE, 128);
    fence_operand(first_half);
    fence_operand(second_half);
    fence_operand(s);
    fence_operand(dp);
    wgmma_fence();
    wgmma_statistics<false>(s, first_half, rows);
    wgmma_statistics<false>(dp, second_half, rows);
  }

  // Issues S = K Qᵀ - lse, of the Q in a stage.
  __device__ __forceinline__ void issue_scores(Scores& s, int stage) {
    const Descriptor keys = descriptor<kQkSlab>(shared.k + first_row() * kQkSlab, kQkDescriptor);
    const Descriptor rows = descriptor<kQkSlab>(shared.q[stage], kQkDescriptor);
#pragma unroll
    for (int d = 0; d < kHeadDimPadded; d += kStepK) {
      wgmma_scores<true>(s, keys + column_offset<kBlockN, kQkSlab>(d),
                         rows + column_offset<kBlockM, kQkSlab>(d));
    }
    wgmma_commit();
  }

  // Issues dP - delta = V dOᵀ - delta.
  __device__ __forceinline__ void issue_dp(Scores& dp) {
    const Descriptor keys = descriptor<kVSlab>(shared.v + first_row() * kVSlab, kVDescriptor);
    const Descriptor rows = descriptor<kVSlab>(shared.dout[dout().stage], kVDescriptor);
#pragma unroll
    for (int d = 0; d < kHeadDimVPadded; d += kStepK) {
      wgmma_scores<true>(dp, keys + column_offset<kBlockN, kVSlab>(d),
                         rows + column_offset<kBlockM, kVSlab>(d));
    }
    wgmma_commit();
  }

  // P, in place of S.
  template <bool masked>
  __device__ __forceinline__ void exponentiate(const Tile& tile, int block, Scores& s) {
#pragma unroll
    for (int i = 0; i < kBlockM / 2; ++i) {
      s[i] = exp2_approx(s[i] * params.scale_log2);
    }
    if (masked) {
      const int key = tile.first_key + first_row() + thread_row();
      const int row = block * kBlockM + lane() % 4 * 2;
#pragma unroll
      for (int i = 0; i < kBlockM / 2; ++i) {
        const Keys seen = seen_by(lengths_of(params, shared), row + column_of(i));
        const int own = key + row_of(i) * 8;
        if (own >= seen.last) {
          s[i] = 0.f;
        }
      }
    }
  }

  __device__ __forceinline__ void pack_scores(Packed& packed, const Scores& s) {
#pragma unroll
    for (int i = 0; i < kBlockM / 4; ++i) {
      packed[i] = pack(s[2 * i], s[2 * i + 1]);
    }
  }

  // dS = P (dP - delta), in place of dP - delta.
  __device__ __forceinline__ void differentiate(const Scores& p, Scores& dp) {
#pragma unroll
    for (int i = 0; i < kBlockM / 2; ++i) {
      dp[i] *= p[i];
    }
  }

  // A warp's 16 rows of dS, for the GEMM that needs it from shared memory.
  __device__ __forceinline__ void store_ds(const Packed& packed) {
    const int row = first_row() + warp_row() + lane() % 16;
#pragma unroll
    for (int column = 0; column < kBlockM; column += 16) {
      char* slab =
          reinterpret_cast<char*>(shared.ds[ds().stage] + column / kDsSlab * kBlockN * kDsSlab);
      const uint32_t* four = packed + column / 4;
      store_matrices(
          slab + swizzled<kDsSlab, kDsSwizzleBits>(row, column % kDsSlab + lane() / 16 * 8),
          four[0], four[1], four[2], four[3]);
    }
  }

  // Issues dV += P dO.
  __device__ __forceinline__ void issue_dv(ValueGradient& dv, Packed& p) {
    const Descriptor rows = along_columns<kBlockM, kVSlab>(shared.dout[dout().stage], kVDescriptor);
    fence_operand(p);
    fence_operand(dv);
    wgmma_fence();
#pragma unroll
    for (int row = 0; row < kBlockM; row += kStepK) {
      wgmma_gradient<true>(dv, p + row / 4, rows + row_offset<kVSlab>(row));
    }
    wgmma_commit();
  }

  // Issues dK += dS Q.
  __device__ __forceinline__ void issue_dk(KeyGradient& dk, Packed& d_scores) {
    const Descriptor rows = along_columns<kBlockM, kQkSlab>(shared.q[q.stage], kQkDescriptor);
    fence_operand(d_scores);
    fence_operand(dk);
    wgmma_fence();
#pragma unroll
    for (int row = 0; row < kBlockM; row += kStepK) {
      wgmma_gradient<true>(dk, d_scores + row / 4, rows + row_offset<kQkSlab>(row));
    }
    wgmma_commit();
  }

  // Issues a part of dQ, of two operands with keys along their rows.
  template <int slab_a, int slab_b, int count>
  __device__ __forceinline__ void multiply_dq(float (&dq)[count], Descriptor a, Descriptor b) {
    fence_operand(dq);
    wgmma_fence();
    wgmma_dq<false>(dq, a, b);
#pragma unroll
    for (int key = kStepK; key < kBlockN; key += kStepK) {
      wgmma_dq<true>(dq, a + row_offset<slab_a>(key), b + row_offset<slab_b>(key));
    }
    wgmma_commit();
  }

  // Issues dQ = dS K: of some rows, or some columns of K.
  template <int count>
  __device__ __forceinline__ void issue_dq(float (&dq)[count], const Element* rows,
                                           const Element* columns) {
    multiply_dq<kDsSlab, kQkSlab>(dq, along_columns<kBlockN, kDsSlab>(rows, kDsDescriptor),
                                  along_columns<kBlockN, kQkSlab>(columns, kQkDescriptor));
  }

  __device__ __forceinline__ KeyBlock& share_of(const Tile& tile) const {
    return params.key_blocks_of(tile.batch, tile.kv_head, tile.first_key / kBlockN)[tile.share];
  }

  // Leaves 64 rows of a gradient as they are, where other thread blocks have the rest of the group.
  template <int all, int count>
  __device__ __forceinline__ void keep(float (&share)[all], const float (&gradient)[count]) {
    float4* to =
        reinterpret_cast<float4*>(share) + first_row() * count / 2 + threadIdx.x % kWarpgroup;
#pragma unroll
    for (int i = 0; i < count; i += 4) {
      to[i / 4 * kWarpgroup] = {gradient[i], gradient[i + 1], gradient[i + 2], gradient[i + 3]};
    }
  }

  // Rounds 64 rows of a gradient to a tile in shared memory.
  template <int columns, int slab, int swizzle_bits, int count>
  __device__ __forceinline__ void round_rows(Element* space, const float (&gradient)[count],
                                             float scale) {
    const int row = first_row() + warp_row() + lane() % 16;
#pragma unroll
    for (int column = 0; column < columns; column += 16) {
      char* base = reinterpret_cast<char*>(space + column / slab * kBlockN * slab);
      const float* x = gradient + column / 2;
      store_matrices(base + swizzled<slab, swizzle_bits>(row, column % slab + lane() / 16 * 8),
                     pack(x[0] * scale, x[1] * scale), pack(x[2] * scale, x[3] * scale),
                     pack(x[4] * scale, x[5] * scale), pack(x[6] * scale, x[7] * scale));
    }
    cutlass::arch::fence_view_async_shared();
  }

  // Rounds 64 rows of a gradient and hands them on to the thread that stores them.
  template <int columns, int slab, int swizzle_bits, int count>
  __device__ __forceinline__ void pass_on(Barrier& full, Element* space,
                                          const float (&gradient)[count], float scale) {
    round_rows<columns, slab, swizzle_bits>(space, gradient, scale);
    full.arrive();  // by every thread: with a branch here ptxas takes nothing in the loop over
                    // tiles to be the same for a warp
  }

  // Both gradients of a tile, where all have read dS.
  __device__ __forceinline__ void leave(const Tile& tile, const KeyGradient& dk,
                                        const ValueGradient& dv) {
    if (tile.first_key < params.kept_keys) {
      keep(share_of(tile).dv, dv);
      keep(share_of(tile).dk, dk);
    }
    pass_on<kHeadDimVPadded, kVSlab, kVSwizzleBits>(shared.dv_full, shared.ds[0], dv, 1.f);
    for (Barrier& empty : shared.dq_empty) {
      empty.wait(dq_phase);  // what adds up has read it
    }
    dq_phase ^= 1;
    pass_on<kHeadDimPadded, kQkSlab, kQkSwizzleBits>(
        shared.dk_full, reinterpret_cast<Element*>(shared.dq), dk, params.scale);
  }

  // Hands numbers of a part of dQ to the thread that adds them up, once there is room; the first
  // finds it.
  template <int count>
  __device__ __forceinline__ void hand_on(float4* to, const float* numbers, int part,
                                          uint32_t phase, int adder) {
    shared.dq_empty[part].wait(phase);
#pragma unroll
    for (int i = 0; i < count; i += 4) {
      to[i / 4 * kWarpgroup] = {numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3]};
    }
    cutlass::arch::fence_view_async_shared();
    arrive(shared.dq_full[adder][part]);
  }

  template <int count>
  __device__ __forceinline__ void pass_dq_on(const float (&dq)[count], int part) {
    float4* to = reinterpret_cast<float4*>(shared.dq) +
                 part * kWarpgroup * kDqColumns / 8 / kDqSlices + threadIdx.x % kWarpgroup;
    hand_on<count>(to, dq, part, dq_phase, adder());
  }

  // Issues S and dP of the next Q and dO.
  __device__ __forceinline__ void issue_scores_and_dp(Scores& s, Scores& dp) {
    shared.q_full[q.stage].wait(q.phase);
    issue_statistics(s, dp);
    issue_scores(s, q.stage);
    shared.dout_full[dout().stage].wait(dout().phase);
    wgmma_fence();  // the wait may have been a loop
    issue_dp(dp);
  }

  // The rest of a step, while dV is on its way: dK, and this warpgroup's part of dQ.
  __device__ __forceinline__ void multiply_ds(KeyGradient& dk, ValueGradient& dv, QueryGradient& dq,
                                              Packed& d_scores) {
    issue_own_dq(dq);
    wgmma_wait<1>();
    fence_operand(dv);
    issue_dk(dk, d_scores);
    wgmma_wait<1>();
    fence_operand(dq);
    arrive(shared.dout_empty[dout().stage]);  // and K and V, if this was the last step
    pass_dq_on(dq, warpgroup);
    wgmma_wait<0>();
    fence_operand(dk);
    arrive(shared.q_empty[q.stage]);
  }

  // Issues this warpgroup's part of dQ, once all have stored their dS.
  __device__ __forceinline__ void issue_own_dq(QueryGradient& dq) {
    barrier_sync(kAllConsumers, kConsumers * kWarpgroup);
    issue_dq(dq, shared.ds[ds().stage] + warpgroup * kDqRowStep * kBlockN,
             shared.k + warpgroup * kDqColumnStep * kBlockN);
  }

  // One block of rows.
  template <bool masked>
  __device__ __forceinline__ void step(const Tile& tile, int block, KeyGradient& dk,
                                       ValueGradient& dv) {
    Scores s, dp;
    issue_scores_and_dp(s, dp);
    wgmma_wait<1>();
    fence_operand(s);
    exponentiate<masked>(tile, block, s);
    fence_operand(s);
    shared.q_full[q.stage].wait(q.phase);  // is over: without a branch here ptxas moves the next
                                           // wait before the exponentials
    wgmma_wait<0>();
    fence_operand(dp);
    differentiate(s, dp);
    Packed p, d_scores;
    pack_scores(p, s);
    pack_scores(d_scores, dp);
    store_ds(d_scores);
    issue_dv(dv, p);
    cutlass::arch::fence_view_async_shared();
    QueryGradient dq;
    multiply_ds(dk, dv, dq, d_scores);
    advance();
  }

  // All blocks of rows of a tile, from the last to the first, for each query head of its group.
  template <class... Registers>
  __device__ __forceinline__ void take_steps(const Tile& tile, Registers&... registers) {
    for (int head = tile.first_head; head < tile.last_head; ++head) {
      int block = tile.last - 1;
      for (; block >= max(tile.full_first, tile.first); --block) {
        step<false>(tile, block, registers...);
      }
      for (; block >= tile.first; --block) {
        step<true>(tile, block, registers...);
      }
    }
  }

  __device__ __forceinline__ void run() {
    Tiles tiles{shared};
    RingPosition<1> own;  // of what there is one of for each tile
    for (Tile tile; (tile = tiles.look()).first_key >= 0; own.advance()) {
      arrive(tiles.take());
      run(tile, own.phase);
    }
  }

  __device__ __forceinline__ void run(const Tile& tile, uint32_t phase) {
    KeyGradient dk = {};
    ValueGradient dv = {};
    shared.dv_empty.wait(phase ^ 1);  // that of the tile before has left dS's space
    take_steps(tile, dk, dv);
    barrier_sync(kAllConsumers, kConsumers * kWarpgroup);  // all have read dS
    leave(tile, dk, dv);
  }
};

// ---- The kernel ------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads, 1)
    attention_backward(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);

  if (threadIdx.x == 0) {
    cute::prefetch_tma_descriptor(&params.q);
    cute::prefetch_tma_descriptor(&params.k);
    cute::prefetch_tma_descriptor(&params.v);
    cute::prefetch_tma_descriptor(&params.dout);
    cute::prefetch_tma_descriptor(&params.dk);
    cute::prefetch_tma_descriptor(&params.dv);
    for (int stage = 0; stage < kStages; ++stage) {
      shared.q_full[stage].init(1);
      shared.q_empty[stage].init(kCluster * kConsumers * kWarpgroup / 32);
    }
    for (int stage = 0; stage < kDoStages; ++stage) {
      shared.dout_full[stage].init(1);
      shared.dout_empty[stage].init(kCluster * kConsumers * kWarpgroup / 32);
    }
    for (int part = 0; part < kDqParts; ++part) {
      for (int adder = 0; adder < kDqAdders; ++adder) {
        shared.dq_full[adder][part].init(kWarpgroup / 32);
      }
      shared.dq_empty[part].init(1);
    }
    shared.dk_full.init(kConsumers * kWarpgroup);
    shared.dv_full.init(kConsumers * kWarpgroup);
    shared.dv_empty.init(1);
    for (int stage = 0; stage < kTileStages; ++stage) {
      shared.tile_full[stage].init(1);
      shared.tile_empty[stage].init(kTileReaders);
    }
    for (TransactionBarrier& full : shared.piece_full) {
      full.init(1);
    }
    shared.no_more_tiles = 0;
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();

  const int warpgroup =
      __shfl_sync(0xffffffff, threadIdx.x / kWarpgroup, 0);  // known to be uniform
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    if (threadIdx.x == 0) {
      Loader{params, shared}.run();
    } else if (threadIdx.x % 32 == 0 && threadIdx.x <= 32 * kDqAdders) {
      add_dq(params, shared, threadIdx.x / 32 - 1);
    } else if (threadIdx.x / 32 == kDqAdders + 1) {
      Rounder{params, shared}.run();
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    Consumer{params, shared, warpgroup - 1}.run();
  }
}

}  // namespace fagen_bwd_bf16_d64_full_m128n128_det_underdp_persist_post_kernel

// ---- The C interface -------------------------------------------------------------------------

#ifndef FAGEN_BACKWARD_ARGS
#define FAGEN_BACKWARD_ARGS 1

extern "C" {

// One call of a kernel of kind backward: the same struct for all of them. Strides are in elements;
// a dimension without one is contiguous.
struct FagenBackwardArgs {
  uint32_t struct_bytes;  // sizeof(FagenBackwardArgs)
  uint32_t version;       // 1: callers built for another are recognised
  void* workspace;  // from a multiple of 16 bytes on as large as fagen_<slug>_workspace says; null
                    // where that is nothing
  int64_t workspace_bytes;  // how large it is
  const void* dout;         // bf16 (batch, seqlen_q, heads, 64): the gradient of out
  const void* q;            // bf16 (batch, seqlen_q, heads, 64)
  const void* k;            // bf16 (batch, seqlen_k, kv_heads, 64)
  const void* v;            // bf16 (batch, seqlen_k, kv_heads, 64)
  const void* out;          // bf16 (batch, seqlen_q, heads, 64): the forward pass's
  const void* lse;   // fp32 (batch, heads, seqlen_q): the forward pass's log-sum-exp, natural
                     // logarithm; minus infinity in a row that sees no key
  const void* dlse;  // fp32 (batch, heads, seqlen_q): the gradient of lse; null: 0
  void* dq;          // bf16 (batch, seqlen_q, heads, 64): the gradient of q
  void* dk;          // bf16 (batch, seqlen_k, kv_heads, 64): the gradient of k
  void* dv;          // bf16 (batch, seqlen_k, kv_heads, 64): the gradient of v
  int64_t dout_stride_batch, dout_stride_head, dout_stride_seq;
  int64_t q_stride_batch, q_stride_head, q_stride_seq;
  int64_t k_stride_batch, k_stride_head, k_stride_seq;
  int64_t v_stride_batch, v_stride_head, v_stride_seq;
  int64_t out_stride_batch, out_stride_head, out_stride_seq;
  int64_t lse_stride_batch, lse_stride_head;
  int64_t dlse_stride_batch, dlse_stride_head;
  int64_t dq_stride_batch, dq_stride_head, dq_stride_seq;
  int64_t dk_stride_batch, dk_stride_head, dk_stride_seq;
  int64_t dv_stride_batch, dv_stride_head, dv_stride_seq;
  int32_t batch, heads, kv_heads, seqlen_q, seqlen_k;
  float scale;  // of q kᵀ before the softmax; finite and positive, 1e+08 at most
};

}  // extern "C"

#elif FAGEN_BACKWARD_ARGS != 1
#error "kernels of kind backward of two versions of fagen in one translation unit"
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
int fagen_bwd_bf16_d64_full_m128n128_det_underdp_persist_post(const struct FagenBackwardArgs* args,
                                                              void* stream);
// How many bytes of workspace a call of these sizes needs; -1 where args is null, or a call of such
// sizes is refused.
int64_t fagen_bwd_bf16_d64_full_m128n128_det_underdp_persist_post_workspace(
    const struct FagenBackwardArgs* args);
const char* fagen_bwd_bf16_d64_full_m128n128_det_underdp_persist_post_message(int status);
const struct FagenKernelInfo* fagen_bwd_bf16_d64_full_m128n128_det_underdp_persist_post_info(void);

}  // extern "C"

// ---- The host's side -------------------------------------------------------------------------

#include "fagen_host.h"
#if FAGEN_HOST_H != 0xa95921b9
#error "the fagen_host.h beside this kernel is that of another version of fagen"
#endif

namespace fagen_bwd_bf16_d64_full_m128n128_det_underdp_persist_post_host {

using namespace fagen_bwd_bf16_d64_full_m128n128_det_underdp_persist_post_kernel;
using namespace fagen_host;
using fagen_host::ceil_div;  // of 64 bits: not what a kernel calls so

constexpr int kMultiprocessors = 132;                   // of the largest Hopper GPU
constexpr int kMachines = kMultiprocessors / kCluster;  // that take a tile each

// What a thread block goes through. All query heads of a KV head's group, and all rows that see its
// keys, where there are enough thread blocks; else the group parts in shares of so many heads, and
// rows in two, and what each finds of dK and dV is summed up afterwards.
struct Deal {
  int heads;
  int cut;                   // blocks of rows, the first ones, that have tiles of their own
  double clocks = INFINITY;  // of a device of kMultiprocessors, as the longest of them works
};

// Clocks of a step, of a tile beside its steps, of one more kernel, and of a part of dK and dV;
// bytes that L2 passes on in one.
constexpr double kStep = 3413, kTile = 8000.0;
constexpr double kLaunch = 3500;
constexpr double kBytes = 1400, kPart = 2 * sizeof(KeyBlock) * kCluster / kBytes;

constexpr int kLeastSteps = 8;  // of rows that are cut

// The best of shares of so many heads, where all rows see the same keys: tiles come in rounds.
void deal_shares(const FagenBackwardArgs& a, int heads, double shares, Deal& best) {
  const double n_blocks = ceil_div(a.seqlen_k, kCluster * kBlockN), tiles = n_blocks * shares,
               steps = ceil_div(a.seqlen_q, kBlockM);
  const double rounds = std::ceil(tiles / kMachines), idle = rounds * kMachines - tiles;
  // in one round of one share all add to dQ of the same rows
  const double block = heads * kStep * (rounds == 1 && n_blocks > kMachines / 2 ? 1.04 : 1);
  const double whole = rounds * (steps * block + kTile) +
                       (shares > double(a.kv_heads) * a.batch ? kLaunch + kPart * tiles : 0);
  if (whole < best.clocks) {
    best = {heads, 0, whole};
  }
  if (idle < 1 || steps < kLeastSteps) {
    return;
  }
  for (int more = 0; more <= 2; ++more) {
    // what is cut off goes to machines that the last round leaves idle, so many to each, and into
    // rounds of its own behind it; each key has two parts, which cost less than those of two shares
    const double each = std::max(0., std::ceil((tiles - more * kMachines) / idle));
    const int cut = int(
        std::clamp((steps * block + kTile - each * kTile) / (block * (1 + each)), 0., steps / 2));
    const double clocks = rounds * ((steps - cut) * block + kTile) + more * (cut * block + kTile) +
                          kLaunch + 1.2 * kPart * tiles;
    if (cut > 0 && clocks < best.clocks) {
      best = {heads, cut, clocks};
    }
  }
}

// The same for the same sizes, on any device.
Deal deal_of(const FagenBackwardArgs& a) {
  const int group = a.kv_heads > 0 ? a.heads / a.kv_heads : 1;
  const double groups = double(a.kv_heads) * a.batch,
               tiles = groups * ceil_div(a.seqlen_k, kCluster * kBlockN);
  Deal best{group, 0};
  for (int shares = 1; tiles * shares < 1 << 30;) {
    const int heads = ceil_div(group, shares);
    if (heads * shares == group) {  // unequal ones end one after another
      deal_shares(a, heads, groups * shares, best);
    }
    if (heads <= 1 || kPart * tiles * shares > best.clocks) {  // which it is of more shares too
      break;
    }
    shares = ceil_div(group, heads - 1);  // the fewest of fewer heads
  }
  return best;
}

// How many shares of so many heads a group has.
int shares_of(const FagenBackwardArgs& a, int heads) {
  return a.kv_heads > 0 ? ceil_div(a.heads / a.kv_heads, std::max(1, heads)) : 1;
}

// What parts of dK and dV take of the workspace.
int64_t shares_bytes(const FagenBackwardArgs& a) {
  const Deal deal = deal_of(a);
  const int shares = shares_of(a, deal.heads) * (deal.cut > 0 ? 2 : 1);
  return shares > 1 ? int64_t(ceil_div(a.seqlen_k, kCluster * kBlockN)) * kCluster * a.kv_heads *
                          a.batch * shares * sizeof(KeyBlock)
                    : 0;
}

// What calls end with, by Status.
constexpr const char* kMessages[] = {
    "launched",
    "struct_bytes or version is that of another FagenBackwardArgs",
    "a size is negative or too large",
    "heads must be a multiple of kv_heads",
    "there are 2^30 tiles or blocks of rows or more",
    "scale must be finite and positive, scale 1e+08 at most",
    "a tensor is given that cannot be",
    "a tensor that is needed is null",
    "a tensor does not begin at a multiple of 16 bytes (lse: 4, dlse: 4)",
    "a stride is negative, too large, or no multiple of 16 bytes",
    "elements of an output (dq, dk, dv) overlap: a stride is 0 or too small",
    "the workspace is null, too small, or does not begin at a multiple of 16 bytes",
    "the current device is not a Hopper GPU (compute capability 9.0)",
    "the CUDA driver is missing, or too old for tensor maps",
    "the CUDA driver refused to describe a tensor for TMA",
    "the kernel could not be launched",
};

// Whether sizes go together, and are not too large.
Status check_sizes(const FagenBackwardArgs& a) {
  for (const int size : {a.batch, a.heads, a.kv_heads, a.seqlen_q, a.seqlen_k}) {
    if (size < 0 || size > 1073741824) {
      return kBadSize;
    }
  }
  if (a.kv_heads == 0 ? a.heads != 0 : a.heads % a.kv_heads != 0) {
    return kBadRatio;
  }
  if (double(ceil_div(a.seqlen_k, 128)) * double(a.kv_heads) * double(a.batch) >= 1 << 30) {
    return kTooMany;
  }
  if (double(ceil_div(a.seqlen_q, 128)) * double(a.heads) * double(a.batch) >= 1 << 30) {
    return kTooMany;
  }
  return kOk;
}

// Of a call whose sizes are checked, which has fewer than 2^30 of what each record is of.
int64_t workspace_bytes([[maybe_unused]] const FagenBackwardArgs& a) {
  return int64_t(36992) * ceil_div(a.seqlen_q, 128) * a.heads * a.batch + shares_bytes(a);
}

Status check(const FagenBackwardArgs& a) {
  if (a.struct_bytes != sizeof(a) || a.version != FAGEN_BACKWARD_ARGS) {
    return kWrongStruct;
  }
  if (const Status status = check_sizes(a)) {
    return status;
  }
  if (!(a.scale > 0) || !std::isfinite(a.scale) || a.scale > 100000000.0) {
    return kBadScalar;
  }
  for (const Status status : {
           check_tensor(a.dout, 2, true, false, kMostStride, 64,
                        {{a.batch, a.dout_stride_batch},
                         {a.seqlen_q, a.dout_stride_seq},
                         {a.heads, a.dout_stride_head}}),
           check_tensor(a.q, 2, true, false, kMostStride, 64,
                        {{a.batch, a.q_stride_batch},
                         {a.seqlen_q, a.q_stride_seq},
                         {a.heads, a.q_stride_head}}),
           check_tensor(a.k, 2, true, false, kMostStride, 64,
                        {{a.batch, a.k_stride_batch},
                         {a.seqlen_k, a.k_stride_seq},
                         {a.kv_heads, a.k_stride_head}}),
           check_tensor(a.v, 2, true, false, kMostStride, 64,
                        {{a.batch, a.v_stride_batch},
                         {a.seqlen_k, a.v_stride_seq},
                         {a.kv_heads, a.v_stride_head}}),
           check_tensor(a.out, 2, true, false, kMostStride, 64,
                        {{a.batch, a.out_stride_batch},
                         {a.seqlen_q, a.out_stride_seq},
                         {a.heads, a.out_stride_head}}),
           check_tensor(a.lse, 4, false, false, kMostStride, a.seqlen_q,
                        {{a.batch, a.lse_stride_batch}, {a.heads, a.lse_stride_head}}),
           !a.dlse ? kOk
                   : check_tensor(a.dlse, 4, false, false, kMostStride, a.seqlen_q,
                                  {{a.batch, a.dlse_stride_batch}, {a.heads, a.dlse_stride_head}}),
           check_tensor(a.dq, 2, true, true, kMostStride, 64,
                        {{a.batch, a.dq_stride_batch},
                         {a.seqlen_q, a.dq_stride_seq},
                         {a.heads, a.dq_stride_head}}),
           check_tensor(a.dk, 2, true, true, kMostStride, 64,
                        {{a.batch, a.dk_stride_batch},
                         {a.seqlen_k, a.dk_stride_seq},
                         {a.kv_heads, a.dk_stride_head}}),
           check_tensor(a.dv, 2, true, true, kMostStride, 64,
                        {{a.batch, a.dv_stride_batch},
                         {a.seqlen_k, a.dv_stride_seq},
                         {a.kv_heads, a.dv_stride_head}}),
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

Status launch(const FagenBackwardArgs& a, cudaStream_t stream) {
  if (a.batch == 0 || a.heads == 0) {
    return kOk;
  }
  constexpr int shared_bytes = sizeof(SharedStorage);
  const int multiprocessors = prepare_device<attention_backward>(shared_bytes);
  if (multiprocessors == 0) {
    return kNotHopper;
  }
  if (!encode_tiled()) {
    return kNoDriver;
  }

  Params params;
  params.out_rows = {static_cast<const Element*>(a.out), a.out_stride_batch, a.out_stride_seq,
                     a.out_stride_head};
  params.dout_rows = {static_cast<const Element*>(a.dout), a.dout_stride_batch, a.dout_stride_seq,
                      a.dout_stride_head};
  params.dq_rows = {static_cast<Element*>(a.dq), a.dq_stride_batch, a.dq_stride_seq,
                    a.dq_stride_head};
  params.dk_rows = {static_cast<Element*>(a.dk), a.dk_stride_batch, a.dk_stride_seq,
                    a.dk_stride_head};
  params.dv_rows = {static_cast<Element*>(a.dv), a.dv_stride_batch, a.dv_stride_seq,
                    a.dv_stride_head};
  params.lse = {static_cast<const float*>(a.lse), a.lse_stride_batch, a.lse_stride_head};
  params.dlse = {static_cast<const float*>(a.dlse), a.dlse_stride_batch, a.dlse_stride_head};
  params.row_blocks = static_cast<RowBlock*>(a.workspace);
  params.heads = a.heads;
  params.kv_heads = a.kv_heads;
  params.group = a.heads / a.kv_heads;
  params.seqlen_q = a.seqlen_q;
  params.seqlen_k = a.seqlen_k;
  params.heads_divisor = FastDivisor(a.heads);
  params.scale = a.scale;

  // LSEs are divided by it, and of less than that nothing is left of S
  params.scale_log2 = std::max(a.scale, 0x1p-100f) * 1.44269504089f;

  const int tile_blocks = 1;  // thread blocks of a tile

  const Deal deal = deal_of(a);
  const int shares = shares_of(a, deal.heads);
  const int m_blocks = int(ceil_div(a.seqlen_q, kBlockM)),
            n_blocks = int(ceil_div(a.seqlen_k, tile_blocks * kBlockN));

  params.cut = deal.cut;
  const int cut_blocks =
      deal.cut > 0
          ? std::clamp(
                int(ceil_div(seen_by(params, deal.cut * kBlockM - 1).last, tile_blocks * kBlockN)),
                0, n_blocks)
          : 0;

  const int64_t tiles = int64_t(n_blocks + cut_blocks) * a.kv_heads * a.batch * shares;
  if (m_blocks == 0 && tiles == 0) {
    return kOk;
  }
  params.key_blocks =
      reinterpret_cast<KeyBlock*>(params.row_blocks + int64_t(a.batch) * a.heads * m_blocks);
  params.shares = cut_blocks > 0 ? 2 * shares : shares;
  params.share_heads = deal.heads;
  params.m_blocks = m_blocks;
  params.n_blocks = n_blocks;
  params.batch_shares = FastDivisor(a.kv_heads * shares);
  params.shares_divisor = FastDivisor(shares);

  // Tiles come in sections of heads whose rows fit their share of the L2 cache.
  const int64_t flat_heads = int64_t(a.kv_heads) * a.batch * shares;
  const int64_t head_bytes = int64_t(a.seqlen_q) * params.share_heads *
                             ((kHeadDim + kHeadDimV) * sizeof(Element) + kHeadDim * sizeof(float));

  // Of more heads where one has many tiles: each of those waits for the one before it, and fewer
  // should be in work at once.
  const int64_t share = kL2Share / 2 * (n_blocks > 32 ? 4 : n_blocks > 8 ? 3 : 2);

  const int64_t last = 1;

  const int64_t section =
      std::clamp<int64_t>(share / std::max<int64_t>(1, head_bytes), 1, flat_heads);
  params.sections = int((flat_heads - last) / section) + 1;
  params.section_heads = FastDivisor(int(section));
  params.section_tiles = FastDivisor(int(section * n_blocks));
  params.last_section_heads = FastDivisor(int(flat_heads - (params.sections - 1) * section));

  // Tiles of rows before the cut begin among the last of the others, which are as long, or behind
  // all of them.
  params.cut_keys = cut_blocks * tile_blocks * kBlockN;
  params.kept_keys = shares > 1 ? a.seqlen_k : params.cut_keys;
  params.flat_shares = int(flat_heads);
  params.first_mixed = n_blocks - cut_blocks;
  params.paired_heads = FastDivisor(std::max(
      1, int(flat_heads) + (params.first_mixed > 0 ? params.last_section_heads.value : 0)));
  params.first_paired =
      cut_blocks > 0 ? int(tiles - int64_t(cut_blocks) * params.paired_heads.value) : INT32_MAX;

  params.tiles = int(tiles);
  const int grid = m_blocks > 0 ? int(std::min<int64_t>(tiles, multiprocessors)) : int(tiles);

  params.row_blocks_count = m_blocks * a.heads * a.batch;
  params.m_blocks_divisor = FastDivisor(m_blocks);
  params.early_blocks = 0;
  if (params.shares == 1 && tiles > 0) {  // a section is of whole heads, in a row
    params.section_blocks = FastDivisor(int(section) * params.group * m_blocks);
    params.early_blocks = (params.sections - 1) * params.section_blocks.value;
  }

  const Tensor q{.data = a.seqlen_q > 0 ? a.q : a.k,
                 .sizes = {kHeadDim, a.seqlen_q, a.heads, a.batch},
                 .strides = {a.q_stride_seq, a.q_stride_head, a.q_stride_batch},
                 .box = {kQkSlab, kBlockM, 1, 1},
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

  const Tensor v{.data = a.seqlen_k > 0 ? a.v : a.dout,
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

  const Tensor dout{.data = a.seqlen_q > 0 ? a.dout : a.v,
                    .sizes = {kHeadDimV, a.seqlen_q, a.heads, a.batch},
                    .strides = {a.dout_stride_seq, a.dout_stride_head, a.dout_stride_batch},
                    .box = {kVSlab, kBlockM, 1, 1},
                    .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                    .type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                    .element_bytes = sizeof(Element),
                    .promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B};
  if (!describe(&params.dout, dout)) {
    return kTensorMapRefused;
  }

  const Tensor dk{.data = a.seqlen_k > 0 ? a.dk : a.q,
                  .sizes = {kHeadDim, a.seqlen_k, a.kv_heads, a.batch},
                  .strides = {a.dk_stride_seq, a.dk_stride_head, a.dk_stride_batch},
                  .box = {kQkSlab, kBlockN, 1, 1},
                  .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                  .type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                  .element_bytes = sizeof(Element),
                  .promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B};
  if (!describe(&params.dk, dk)) {
    return kTensorMapRefused;
  }

  const Tensor dv{.data = a.seqlen_k > 0 ? a.dv : a.dout,
                  .sizes = {kHeadDimV, a.seqlen_k, a.kv_heads, a.batch},
                  .strides = {a.dv_stride_seq, a.dv_stride_head, a.dv_stride_batch},
                  .box = {kVSlab, kBlockN, 1, 1},
                  .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                  .type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                  .element_bytes = sizeof(Element),
                  .promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B};
  if (!describe(&params.dv, dv)) {
    return kTensorMapRefused;
  }

  if (m_blocks > 0) {
    by_heads(params, a.heads, a.batch, [&](int heads, int batches) {
      prepare_rows<<<dim3(m_blocks, heads, batches), kRowThreads, 0, stream>>>(params);
    });
  }
  if (tiles > 0) {
    attention_backward<<<grid, kThreads, shared_bytes, stream>>>(params);
  }
  if (tiles > 0 && params.shares > 1) {
    by_heads(params, a.kv_heads, a.batch, [&](int heads, int batches) {
      sum_shares<<<dim3(ceil_div(std::min(a.seqlen_k, params.kept_keys), kWarpgroupRows), heads,
                        batches),
                   kRowThreads, 0, stream>>>(params);
    });
  }
  if (m_blocks > 0) {
    round_dq<<<std::min(params.row_blocks_count, 8 * multiprocessors), kRowThreads, 0, stream>>>(
        params);
  }
  return cudaGetLastError() == cudaSuccess ? kOk : kLaunchFailed;
}

}  // namespace fagen_bwd_bf16_d64_full_m128n128_det_underdp_persist_post_host

extern "C" int fagen_bwd_bf16_d64_full_m128n128_det_underdp_persist_post(
    const FagenBackwardArgs* args, void* stream) {
  using namespace fagen_bwd_bf16_d64_full_m128n128_det_underdp_persist_post_host;
  const Status status = args ? check(*args) : kNullPointer;
  return status ? status : launch(*args, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t fagen_bwd_bf16_d64_full_m128n128_det_underdp_persist_post_workspace(
    const FagenBackwardArgs* args) {
  using namespace fagen_bwd_bf16_d64_full_m128n128_det_underdp_persist_post_host;
  return args && !check_sizes(*args) ? workspace_bytes(*args) : -1;
}

extern "C" const char* fagen_bwd_bf16_d64_full_m128n128_det_underdp_persist_post_message(
    int status) {
  using namespace fagen_bwd_bf16_d64_full_m128n128_det_underdp_persist_post_host;
  constexpr int kNoKernel = 100;  // of who chooses among kernels
  return status >= 0 && status <= kLaunchFailed ? kMessages[status]
         : status == kNoKernel                  ? "no kernel computes that"
                                                : "unknown status";
}

extern "C" const FagenKernelInfo* fagen_bwd_bf16_d64_full_m128n128_det_underdp_persist_post_info(
    void) {
  using namespace fagen_bwd_bf16_d64_full_m128n128_det_underdp_persist_post_kernel;
  static const FagenKernelInfo info = {
      sizeof(FagenKernelInfo),
      kSharedBytes,
      kThreads,
      kLaunchRegisters,
      "bwd_bf16_d64_full_m128n128_det_underdp_persist_post",
      "1704d31b6b57d25a6c9db92f7867820b40c133d1d461874aa35bdc035c5bf501"};
  return &info;
}
// sha256 of what is above: a4549291cb5f0f76371dc4d4e5a5eb37e38865e285cbe52a31d7bad13d572bd6
