// bwd_fp16_d256_full_m64n64_dss1_intra_c2: the gradients of fused attention for Hopper (sm_90a).
// Rendered by fagen; do not edit.
//
//   P = exp(scale * q kᵀ - lse)        dv = Pᵀ dout
//   dP = dout vᵀ                       dS = P (dP - delta), delta = sum(dout * out) of a row
//   dk = scale * dSᵀ q                 dq = scale * dS k
//
// A first kernel works out delta, and a last one rounds dq. Between them a thread block has 64 keys
// of one KV head and goes through all rows that see them, 64 at a time, of each query head of its
// group. dk and dv stay in registers; dq is added up in global memory, in fp32.
//
// S and dP lie transposed, keys along the rows: so P and dS are, as they come out of one GEMM, the
// register operands of the next. One producer warp loads by TMA, and two add dq up by TMA. 2
// consumer warpgroups multiply by WGMMA, one for each gradient.
//
// Needs fagen_host.h, which lies beside it, the headers below, and
// -gencode=arch=compute_90a,code=sm_90a.

#include <cuda.h>
#include <cuda_fp16.h>
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

namespace fagen_bwd_fp16_d256_full_m64n64_dss1_intra_c2_kernel {

// ---- The schedule ----------------------------------------------------------------------------

using Element = __half;
using Pair = __half2;
using OutElement = Element;

constexpr int kWarpgroup = 128;
constexpr int kWarpgroupRows = 64;  // the M of every wgmma

constexpr int kHeadDim = 256;
constexpr int kHeadDimV = 256;
constexpr int kHeadDimPadded = 256;  // in shared memory, padded with zeros
constexpr int kHeadDimVPadded = 256;
constexpr int kBlockM = 64;    // rows of a step
constexpr int kBlockN = 64;    // keys of a thread block
constexpr int kCluster = 2;    // thread blocks of neighbouring keys, which have the same rows
constexpr int kStages = 2;     // Q buffers
constexpr int kDoStages = 1;   // dO buffers
constexpr int kDsStages = 1;   // dS buffers
constexpr int kConsumers = 2;  // warpgroups

constexpr int kThreads = 384;
constexpr int kLaunchRegisters = 168;
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;
constexpr int kRowThreads = 256;  // of the kernels before and after
constexpr int kRowLanes = 32;     // of those, that share a row

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

constexpr int64_t kL2Share = 10485760;  // bytes of the L2 cache for Q, dO and dQ

constexpr int kDqColumns = 64;     // that a warpgroup computes, of all rows
constexpr int kDqRowStep = 0;      // rows between the parts of dQ of two warpgroups
constexpr int kDqColumnStep = 64;  // and columns; of both one is 0
constexpr int kDqParts = 2;        // warpgroups that compute dQ
constexpr int kDqAdders = 2;       // threads that add it up, in turns
constexpr int kDqSlices = 2;       // in which each hands it on
constexpr int kLine = 128;         // of the L2 cache: additions that begin within one take longer

// A thread's part of a warpgroup's accumulators.
using Scores = float[kBlockM / 2];  // S, dP: 64 keys by kBlockM rows
using KeyGradient = float[kHeadDimPadded / 2];
using ValueGradient = float[kHeadDimVPadded / 2];
using QueryGradient = float[kDqColumns / 2];
using Packed = uint32_t[kBlockM / 4];  // P, dS in fp16

using Barrier = cutlass::arch::ClusterBarrier;
using TransactionBarrier = cutlass::arch::ClusterTransactionBarrier;

template <class Integer>
__host__ __device__ constexpr Integer ceil_div(Integer a, Integer b) {
  return (a + b - 1) / b;
}

// kBlockN keys of one KV head with a share of its query heads, and the blocks first … last - 1 of
// kBlockM rows that see some of them, or of the keys of the cluster's other thread block. Of the
// full ones every row sees all of its own.
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

// Of a row tensor cores add two numbers to products of its: as sums of three bf16 each, side by
// side, core matrices of eight rows.
using Statistics = uint4[kBlockM];

// What of a row's statistics a product adds, by where its ones lie.
enum Statistic { kOfDelta, kOfLse };

// Two numbers as sums of three bf16 each, which is all of their 24 bits, and two zeros.
__device__ __forceinline__ uint4 in_parts(float a, float b) {
  uint32_t part[6];
#pragma unroll
  for (int i = 0; i < 6; ++i) {
    float& number = i < 3 ? a : b;
    part[i] = __float_as_uint(number) & 0xffff0000;
    number -= __uint_as_float(part[i]);
  }
  return {part[1] | part[0] >> 16, part[3] | part[2] >> 16, part[5] | part[4] >> 16, 0};
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
  uint32_t
      added[kCluster];  // 1 once dQ's first part is, of the half that a block of a cluster computes
};
static_assert(sizeof(RowBlock) == 66688, "the workspace outgrew the plan's formula");

// Tiles lie as slabs: columns of one swizzle span, all rows of a slab together.
struct SharedStorage {
  alignas(1024) Element k[kBlockN * kHeadDimPadded];
  alignas(1024) Element v[kBlockN * kHeadDimVPadded];
  alignas(1024) Element q[kStages][kBlockM * kHeadDimPadded];
  alignas(1024) Element dout[kDoStages][kBlockM * kHeadDimVPadded];
  alignas(1024) Element ds[kDsStages][kBlockN * kBlockM];  // transposed: keys along the rows
  alignas(1024)
      uint32_t p[kDsStages][kBlockN * kBlockM / 2];  // P, in the order of the threads' registers
  // K of the other block's keys, in the columns of which this block computes dQ.
  alignas(1024) Element k_peer[kBlockN * kHeadDimPadded / kCluster];
  alignas(1024) Element ds_peer[kDsStages][kBlockN * kBlockM];  // of the other block's keys
  alignas(1024) Statistics statistics[kStages];
  uint4 ones[24];  // core matrices that serve for all rows: what -delta is multiplied by, and -LSE
                   // / scale, and zeros
  TransactionBarrier k_full;
  TransactionBarrier v_full;
  TransactionBarrier q_full[kStages];
  TransactionBarrier dout_full[kDoStages];
  Barrier q_empty[kStages];
  Barrier dout_empty[kDoStages];
  Barrier p_full[kDsStages];
  Barrier p_empty[kDsStages];
  TransactionBarrier ds_peer_full[kDsStages];
  Barrier ds_full[kDsStages];
  Barrier ds_empty[kDsStages];
  Barrier dq_full[kDqAdders][kDqParts];  // for each that adds, so that none misses a phase
  Barrier dq_empty[kDqParts];
  alignas(1024) float dq[kBlockM * kHeadDimPadded / kCluster / kDqSlices];
};
constexpr int kSharedBytes = sizeof(SharedStorage);
static_assert(kSharedBytes <= 224256, "the layout outgrew the plan's ledger");

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
  int seqlen_q, seqlen_k, m_blocks, n_blocks, sections;
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
  const Pair pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

__device__ __forceinline__ float2 unpack(uint32_t pair) {
  return __half22float2(reinterpret_cast<const Pair&>(pair));
}

// Hardware barriers, by number; 0 is __syncthreads.
enum NamedBarrier { kKeysRead = 1, kValuesRead, kKeyConsumer, kStore };

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

// Which of the cluster's blocks this is; the other has 1 less that.
__device__ __forceinline__ int cluster_rank() {
  return blockIdx.x % kCluster;
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
  tile.first_key = first_key + cluster_rank() * kBlockN;
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
__device__ __forceinline__ void wgmma_statistics(float (&c)[32], Descriptor a, Descriptor b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{ %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31 }, "
      "%32, %33, %34, 1, 1, 0, 0;"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]),
        "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]),
        "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]),
        "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
      : "l"(a.bits()), "l"(b.bits()), "n"(accumulate ? 1 : 0));
}

// S, or dP: keys by rows, both operands as they lie.
template <bool accumulate>
__device__ __forceinline__ void wgmma_scores(float (&c)[32], Descriptor a, Descriptor b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{ %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31 }, "
      "%32, %33, %34, 1, 1, 0, 0;"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]),
        "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]),
        "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]),
        "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
      : "l"(a.bits()), "l"(b.bits()), "n"(accumulate ? 1 : 0));
}

// dV, or dK if it is as wide: P by dO, dS by Q.
template <bool accumulate>
__device__ __forceinline__ void wgmma_gradient(float (&c)[128], const uint32_t* a, Descriptor b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 "
      "{ %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127 }, "
      "{ %128, %129, %130, %131 }, %132, %133, 1, 1, 1;"
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
        "+f"(c[77]), "+f"(c[78]), "+f"(c[79]), "+f"(c[80]), "+f"(c[81]), "+f"(c[82]), "+f"(c[83]),
        "+f"(c[84]), "+f"(c[85]), "+f"(c[86]), "+f"(c[87]), "+f"(c[88]), "+f"(c[89]), "+f"(c[90]),
        "+f"(c[91]), "+f"(c[92]), "+f"(c[93]), "+f"(c[94]), "+f"(c[95]), "+f"(c[96]), "+f"(c[97]),
        "+f"(c[98]), "+f"(c[99]), "+f"(c[100]), "+f"(c[101]), "+f"(c[102]), "+f"(c[103]),
        "+f"(c[104]), "+f"(c[105]), "+f"(c[106]), "+f"(c[107]), "+f"(c[108]), "+f"(c[109]),
        "+f"(c[110]), "+f"(c[111]), "+f"(c[112]), "+f"(c[113]), "+f"(c[114]), "+f"(c[115]),
        "+f"(c[116]), "+f"(c[117]), "+f"(c[118]), "+f"(c[119]), "+f"(c[120]), "+f"(c[121]),
        "+f"(c[122]), "+f"(c[123]), "+f"(c[124]), "+f"(c[125]), "+f"(c[126]), "+f"(c[127])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()), "n"(accumulate ? 1 : 0));
}

// dQ: dS by K, dS as it lies transposed.
template <bool accumulate>
__device__ __forceinline__ void wgmma_dq(float (&c)[32], Descriptor a, Descriptor b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
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

__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The address of what lies there in the other block's shared memory.
__device__ __forceinline__ uint32_t at_peer(const void* own) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(cute::cast_smem_ptr_to_uint(own)), "r"(1 - cluster_rank()));
  return address;
}

// Copies to the same place in the other block, whose barrier there counts the bytes.
__device__ __forceinline__ void copy_to_peer(const void* from, const void* to,
                                             const TransactionBarrier& full, int bytes) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(at_peer(to)),
      "r"(cute::cast_smem_ptr_to_uint(from)), "r"(bytes), "r"(at_peer(&full))
      : "memory");
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
  if (threadIdx.x < kCluster) {
    record.added[threadIdx.x] = 0;
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
      record.statistics[row] =
          in_parts(subtracted > 0x1p127f ? -0x1p127f : -subtracted, lse > -INFINITY ? -delta : 0.f);
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

// After the main kernel: scale and round the sums of dq, by way of shared memory.
__global__ void __launch_bounds__(kRowThreads) round_dq(const __grid_constant__ Params params) {
  const BlockOfRows own = own_block_of_rows(params);
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

  // Every other slab of a block of rows, for both blocks of the cluster; the other loads the rest.
  template <int columns, int slab>
  __device__ __forceinline__ void copy_rows(const CUtensorMap& map, TransactionBarrier& full,
                                            Element* to, const Tile& tile, int head, int block) {
#pragma unroll 1
    for (int column = cluster_rank() * slab; column < columns; column += kCluster * slab) {
      cute::SM90_TMA_LOAD_MULTICAST_4D::copy(
          &map, reinterpret_cast<uint64_t*>(&full), (1 << kCluster) - 1,
          static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST), to + column * kBlockM,
          column, block * kBlockM, head, tile.batch);
    }
  }

  // K, and what dQ needs of the other block's.
  __device__ __forceinline__ void load_k(const Tile& tile) {
    constexpr auto kOnce = cute::TMA::CacheHintSm90::EVICT_FIRST;
    shared.k_full.arrive_and_expect_tx(sizeof(shared.k) + sizeof(shared.k_peer));
    const int peer_key = tile.first_key + (1 - 2 * cluster_rank()) * kBlockN,
              half = kHeadDimPadded / kCluster;
#pragma unroll 1
    for (int column = 0; column < half; column += kQkSlab) {
      cute::SM90_TMA_LOAD_4D::copy(&params.k, reinterpret_cast<uint64_t*>(&shared.k_full),
                                   static_cast<uint64_t>(kOnce), shared.k_peer + column * kBlockN,
                                   cluster_rank() * half + column, peer_key, tile.kv_head,
                                   tile.batch);
    }
    copy_keys<kHeadDimPadded, kQkSlab>(params.k, shared.k_full, shared.k, tile);
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

  __device__ __forceinline__ void run(const Tile& tile) {
    RingPosition<kStages> q;
    RingPosition<kDoStages> dout;
    load_k(tile);
    shared.v_full.arrive_and_expect_tx(sizeof(shared.v));
    copy_keys<kHeadDimVPadded, kVSlab>(params.v, shared.v_full, shared.v, tile);
    for (int head = tile.first_head; head < tile.last_head; ++head) {
#pragma unroll 1
      for (int step = 0; step < tile.last - tile.first; ++step) {
        const int block = block_of(tile, step);
        load_q(q, tile, head, block, kQBytes);
        q.advance();
        load_dout(dout, tile, head, block, kDoutBytes);
        dout.advance();
      }
    }
  }
};

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

// The half of a block's sums that this block of the cluster adds to, and the counter of what has
// been added there.
__device__ __forceinline__ float* sums_of(RowBlock& record) {
  return record.dq + cluster_rank() * kBlockM * kHeadDimPadded / kCluster;
}
__device__ __forceinline__ uint32_t* counter_of(RowBlock& record) {
  return record.added + cluster_rank();
}

// Parts of dQ are added up in any order but for the first, which is stored. A tile waits for tiles
// only that were begun before it.
__device__ __forceinline__ void await_turn(const uint32_t* added, int turn) {
  await_count(added, min(turn, 1));
}

__device__ __forceinline__ void end_turn(uint32_t* added, int turn) {
  if (turn == 0) {
    await_additions();
    release(added);
  }
}

// Used by two threads of different warps, which take turns: one waits for others, or until its
// additions are known, while the other adds.
__device__ __forceinline__ void add_dq(const Params& params, SharedStorage& shared,
                                       const Tile& tile, int adder) {
  Barrier* const full = shared.dq_full[adder];
  int step = adder;
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
          full[part].wait(slice % 2);
          const int begin = part * dq_part(0), count = dq_part(part) / kDqSlices;
          add(sums + begin + slice * count, shared.dq + begin / kDqSlices, count, turn);
          cute::tma_store_arrive();
        }
        cute::tma_store_wait<1>();  // it has been read
        shared.dq_empty[0].arrive();
        cute::tma_store_wait<0>();  // it has been read
        shared.dq_empty[1].arrive();
      }
      end_turn(added, turn);
    }
    step -= steps;
  }
  await_additions();
}

// ---- Multiplying -----------------------------------------------------------------------------

// A warpgroup that multiplies.
struct Consumer {
  const Params& params;
  SharedStorage& shared;
  const int warpgroup;  // 0 … kConsumers - 1

  // Rings of as many buffers go round together: registers are scarce.
  RingPosition<kStages> q;
  RingPosition<kDoStages> own_dout;
  __device__ __forceinline__ RingPosition<kDoStages> dout() const { return own_dout; }
  RingPosition<kDsStages> own_ds;
  __device__ __forceinline__ RingPosition<kDsStages> ds() const { return own_ds; }

  __device__ __forceinline__ void advance() {
    q.advance();
    own_dout.advance();
    own_ds.advance();
    count_step();
  }

  uint32_t dq_phase = 1;  // the first step finds its buffer empty

  __device__ __forceinline__ void count_step() { dq_phase ^= 1; }

  // Who adds the dQ of a step up.
  __device__ __forceinline__ int adder() const { return dq_phase ^ 1; }

  // The first of its keys in the tile: both warpgroups have all 64.
  __device__ __forceinline__ int first_row() const { return 0; }

  // One arrival per warp, since wgmma completes per warp, for what all of its lanes have read and
  // written.
  __device__ __forceinline__ void arrive(Barrier& barrier) {
    __syncwarp();
    if (lane() == 0) {
      barrier.arrive();
    }
  }

  // Issues what S or dP - delta begins with: ones by the parts of -lse or of -delta, which lie side
  // by side. The second eight of 16 columns are the first again, and multiplied by zeros.
  __device__ __forceinline__ void issue_statistics(Scores& s, int stage, int which) {
    constexpr auto kUnswizzled = cute::SM90::GMMA::LayoutType::INTERLEAVE;
    const uint4* ones = shared.ones + which * 8;
    const uint32_t to_zeros = (sizeof(shared.ones) / 3) * (2 - which);
    fence_operand(s);
    wgmma_fence();
    wgmma_statistics<false>(
        s, descriptor<0>(reinterpret_cast<const Element*>(ones), kUnswizzled, to_zeros),
        descriptor<8>(reinterpret_cast<const Element*>(shared.statistics[stage]), kUnswizzled, 0));
  }

  // Issues S = K Qᵀ - lse, of the Q in a stage.
  __device__ __forceinline__ void issue_scores(Scores& s, int stage) {
    const Descriptor keys = descriptor<kQkSlab>(shared.k + first_row() * kQkSlab, kQkDescriptor);
    const Descriptor rows = descriptor<kQkSlab>(shared.q[stage], kQkDescriptor);
    issue_statistics(s, stage, kOfLse);
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
    issue_statistics(dp, q.stage, kOfDelta);
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
  __device__ __forceinline__ void differentiate(const Packed& p, Scores& dp) {
#pragma unroll
    for (int i = 0; i < kBlockM / 2; i += 2) {
      const float2 two = unpack(p[i / 2]);
      dp[i] *= two.x;
      dp[i + 1] *= two.y;
    }
  }

  // A warp's 16 rows of dS, for the GEMM that needs it from shared memory.
  __device__ __forceinline__ void store_ds(const Packed& packed) {
    shared.ds_empty[ds().stage].wait(ds().phase ^ 1);  // that of an earlier step has been read
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

  // Copies 64 rows of some columns of a tile to global memory.
  __device__ __forceinline__ void copy_rows(const CUtensorMap& map, const Element* from, int column,
                                            const Tile& tile) {
    cute::SM90_TMA_STORE_4D::copy(&map, from, column, tile.first_key + first_row(), tile.kv_head,
                                  tile.batch);
  }

  // Rounds 64 rows of a gradient and stores them through the shared memory of what it is the
  // gradient of.
  template <int columns, int slab, int swizzle_bits, int count>
  __device__ __forceinline__ void store(const CUtensorMap& map, Element* space,
                                        const float (&gradient)[count], float scale,
                                        const Tile& tile) {
    round_rows<columns, slab, swizzle_bits>(space, gradient, scale);
    barrier_sync(kStore + warpgroup, kWarpgroup);
    if (threadIdx.x % kWarpgroup == 0) {
#pragma unroll
      for (int column = 0; column < columns; column += slab) {
        copy_rows(map, space + (column / slab * kBlockN + first_row()) * slab, column, tile);
      }
      cute::tma_store_arrive();
    }
  }

  __device__ __forceinline__ void finish() {
    if (threadIdx.x % kWarpgroup == 0) {
      cute::tma_store_wait<0>();  // shared memory must outlive the copies from it
    }
  }

  __device__ __forceinline__ void store_dv(const Tile& tile, const ValueGradient& dv) {
    store<kHeadDimVPadded, kVSlab, kVSwizzleBits>(params.dv, shared.v, dv, 1.f, tile);
  }

  __device__ __forceinline__ void store_dk(const Tile& tile, const KeyGradient& dk) {
    store<kHeadDimPadded, kQkSlab, kQkSwizzleBits>(params.dk, shared.k, dk, params.scale, tile);
  }

  // One gradient of a tile, where both have read what it is the gradient of.
  __device__ __forceinline__ void leave_dv(const Tile& tile, const ValueGradient& dv) {
    if (tile.first_key < params.kept_keys) {
      keep(share_of(tile).dv, dv);
      return;
    }
    store_dv(tile, dv);
    finish();
  }

  __device__ __forceinline__ void leave_dk(const Tile& tile, const KeyGradient& dk) {
    if (tile.first_key < params.kept_keys) {
      keep(share_of(tile).dk, dk);
      return;
    }
    store_dk(tile, dk);
    finish();
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

  float rest[kDqColumns / 2 / kDqSlices];  // the last slice of the dQ of the step before
  bool has_rest = false;

  // One slice after another, but for the last.
  template <int count>
  __device__ __forceinline__ void pass_dq_on(const float (&dq)[count], int part) {
    float4* to = reinterpret_cast<float4*>(shared.dq) +
                 part * kWarpgroup * kDqColumns / 8 / kDqSlices + threadIdx.x % kWarpgroup;
#pragma unroll
    for (int slice = 0; slice < kDqSlices - 1; ++slice) {
      hand_on<count / kDqSlices>(to, dq + slice * (count / kDqSlices), part, slice % 2 ^ 1,
                                 adder());
    }
#pragma unroll
    for (int i = 0; i < count / kDqSlices; ++i) {
      // by an instruction: else ptxas takes it for a register of the products, and waits for these
      asm volatile("mov.b32 %0, %1;" : "=f"(rest[i]) : "f"(dq[count - count / kDqSlices + i]));
    }
    has_rest = true;
  }

  // Hands on what pass_dq_on left of the dQ of the step before: by now the slice before it has been
  // read.
  template <int count>
  __device__ __forceinline__ void pass_rest_on(int part) {
    if (has_rest) {
      float4* to = reinterpret_cast<float4*>(shared.dq) +
                   part * kWarpgroup * kDqColumns / 8 / kDqSlices + threadIdx.x % kWarpgroup;
      hand_on<count / kDqSlices>(to, rest, part, (kDqSlices - 1) % 2 ^ 1, adder() ^ 1);
    }
  }

  // Gives a buffer back to those who fill it in both blocks of the cluster: an arrival per warp at
  // the barriers of both.
  __device__ __forceinline__ void release(Barrier& empty) {
    __syncwarp();
    if (lane() < kCluster) {
      empty.arrive(lane());
    }
  }

  // Issues dQ += dS K, of the other block's keys.
  template <int count>
  __device__ __forceinline__ void issue_peer_dq(float (&dq)[count], const Element* rows,
                                                const Element* columns) {
    const Descriptor a = along_columns<kBlockN, kDsSlab>(rows, kDsDescriptor);
    const Descriptor b = along_columns<kBlockN, kQkSlab>(columns, kQkDescriptor);
    fence_operand(dq);
    wgmma_fence();
#pragma unroll
    for (int key = 0; key < kBlockN; key += kStepK) {
      wgmma_dq<true>(dq, a + row_offset<kDsSlab>(key), b + row_offset<kQkSlab>(key));
    }
    wgmma_commit();
  }

  // Issues dQ of both blocks' keys and this block's columns of K from one on.
  template <int count>
  __device__ __forceinline__ void issue_dq_from(int column, float (&dq)[count]) {
    shared.ds_peer_full[ds().stage].wait(ds().phase);
    issue_dq(dq, shared.ds[ds().stage],
             shared.k + (cluster_rank() * kHeadDimPadded / kCluster + column) * kBlockN);
    issue_peer_dq(dq, shared.ds_peer[ds().stage], shared.k_peer + column * kBlockN);
  }

  // dS is there, for both warpgroups, and for those of the other block once it has come there.
  __device__ __forceinline__ void pass_ds_on() {
    cutlass::arch::fence_view_async_shared();
    barrier_sync(kKeyConsumer, kWarpgroup);  // all of it is there
    if (threadIdx.x % kWarpgroup == 0) {
      TransactionBarrier& full = shared.ds_peer_full[ds().stage];
      full.arrive_and_expect_tx(sizeof(shared.ds[0]));
      copy_to_peer(shared.ds[ds().stage], shared.ds_peer[ds().stage], full, sizeof(shared.ds[0]));
    }
    arrive(shared.ds_full[ds().stage]);
  }

  // P in shared memory, as a thread of either warpgroup has it.
  __device__ __forceinline__ uint4* shared_p() {
    return reinterpret_cast<uint4*>(shared.p[ds().stage]) + threadIdx.x % kWarpgroup;
  }

  // Hands P to the other warpgroup.
  __device__ __forceinline__ void pass_p_on(const Packed& p) {
    shared.p_empty[ds().stage].wait(ds().phase ^ 1);
    uint4* const to = shared_p();
#pragma unroll
    for (int i = 0; i < kBlockM / 4; i += 4) {
      to[i / 4 * kWarpgroup] = {p[i], p[i + 1], p[i + 2], p[i + 3]};
    }
    arrive(shared.p_full[ds().stage]);
  }

  // Takes P from the other warpgroup.
  __device__ __forceinline__ void take_p(Packed& p) {
    shared.p_full[ds().stage].wait(ds().phase);
    const uint4* const from = shared_p();
#pragma unroll
    for (int i = 0; i < kBlockM / 4; i += 4) {
      const uint4 four = from[i / 4 * kWarpgroup];
      p[i] = four.x, p[i + 1] = four.y, p[i + 2] = four.z, p[i + 3] = four.w;
    }
    fence_operand(p);  // it has been read
  }

  // Makes P of S and hands it on, until dO is there.
  template <bool masked>
  __device__ __forceinline__ void make_p(const Tile& tile, int block, Scores& s, Packed& p) {
    release(shared.q_empty[q.stage]);
    exponentiate<masked>(tile, block, s);
    pack_scores(p, s);
    pass_p_on(p);
    pass_rest_on<kDqColumns / 2>(0);
    shared.dout_full[dout().stage].wait(dout().phase);
  }

  // Issues S of the step after this one. After the last it is that of what lies there, and not
  // used: a condition here would have ptxas wait for each product.
  __device__ __forceinline__ void issue_next_scores(Scores& s, bool more) {
    RingPosition<kStages> next = q;
    next.advance();
    if (more) {
      shared.q_full[next.stage].wait(next.phase);
    }
    issue_scores(s, next.stage);
  }

  // One block of rows, for dV and a part of dQ, whose S is there; when this ends, so is that of the
  // next.
  template <bool masked>
  __device__ __forceinline__ void step(const Tile& tile, int block, bool more, Scores& s,
                                       ValueGradient& dv) {
    Packed p;
    make_p<masked>(tile, block, s, p);
    issue_dv(dv, p);
    issue_next_scores(s, more);
    wgmma_wait<1>();  // P's registers are free, and dO, whose ring may be of one
    fence_operand(dv);
    release(shared.dout_empty[dout().stage]);
    shared.ds_full[ds().stage].wait(ds().phase);
    QueryGradient dq;
    issue_dq_from(0, dq);
    wgmma_wait<0>();
    fence_operand(dq);
    fence_operand(s);
    release(shared.ds_empty[ds().stage]);
    pass_dq_on(dq, 0);
    advance();
  }

  // All of a tile.
  __device__ __forceinline__ void make_dv(const Tile& tile, ValueGradient& dv) {
    Scores s;
    if (tile.first < tile.last) {
      shared.q_full[0].wait(0);
      issue_scores(s, 0);
      wgmma_wait<0>();
      fence_operand(s);
    }
    take_steps(tile, s, dv);
  }

  // The other part of dQ, under which dK is finished.
  __device__ __forceinline__ void finish_dk(KeyGradient& dk) {
    shared.ds_full[ds().stage].wait(ds().phase);
    float dq[dq_part(1) / kWarpgroup];
    issue_dq_from(kDqColumns, dq);
    wgmma_wait<2>();  // all but dQ, which is a product for each block of the cluster
    fence_operand(dk);
    release(shared.q_empty[q.stage]);
    wgmma_wait<0>();
    fence_operand(dq);
    release(shared.ds_empty[ds().stage]);
    pass_dq_on(dq, 1);
  }

  // One block of rows, for dS and dK.
  __device__ __forceinline__ void step_dk(KeyGradient& dk) {
    Scores dp;
    shared.q_full[q.stage].wait(q.phase);  // -delta comes with Q
    shared.dout_full[dout().stage].wait(dout().phase);
    issue_dp(dp);
    pass_rest_on<dq_part(1) / kWarpgroup>(1);
    Packed p;
    take_p(p);
    wgmma_wait<0>();
    fence_operand(dp);
    arrive(shared.p_empty[ds().stage]);
    release(shared.dout_empty[dout().stage]);
    differentiate(p, dp);
    Packed d_scores;
    pack_scores(d_scores, dp);
    store_ds(d_scores);
    pass_ds_on();
    issue_dk(dk, d_scores);
    finish_dk(dk);
    advance();
  }

  // All blocks of rows of a tile, from the last to the first, for each query head of its group.
  template <class... Registers>
  __device__ __forceinline__ void take_steps(const Tile& tile, Registers&... registers) {
    for (int head = tile.first_head; head < tile.last_head; ++head) {
      int block = tile.last - 1;
      for (; block >= max(tile.full_first, tile.first); --block) {
        step<false>(tile, block, block > tile.first || head + 1 < tile.last_head, registers...);
      }
      for (; block >= tile.first; --block) {
        step<true>(tile, block, block > tile.first || head + 1 < tile.last_head, registers...);
      }
    }
  }

  // The first warpgroup's way: it makes P, dV, and dQ or a part of its columns. Neither waits for
  // the other but for what it needs next.
  __device__ __forceinline__ void run_dv(const Tile& tile) {
    ValueGradient dv = {};
    shared.k_full.wait(0);
    make_dv(tile, dv);
    pass_rest_on<kDqColumns / 2>(0);
    barrier_arrive(kKeysRead, kConsumers * kWarpgroup);
    barrier_sync(kValuesRead, kConsumers * kWarpgroup);  // by the other, for dP
    leave_dv(tile, dv);
  }

  // The second's: it makes dS of P, dK, and the rest of dQ if there is any.
  __device__ __forceinline__ void run_dk(const Tile& tile) {
    KeyGradient dk = {};
    shared.k_full.wait(0);
    shared.v_full.wait(0);
    for (int head = tile.first_head; head < tile.last_head; ++head) {
#pragma unroll 1
      for (int block = tile.first; block < tile.last; ++block) {
        step_dk(dk);
      }
    }
    pass_rest_on<dq_part(1) / kWarpgroup>(1);
    barrier_arrive(kValuesRead, kConsumers * kWarpgroup);
    barrier_sync(kKeysRead, kConsumers * kWarpgroup);  // by the other, for S and dQ
    leave_dk(tile, dk);
  }
};

// ---- The kernel ------------------------------------------------------------------------------

__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    attention_backward(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);

  if (threadIdx.x < 24) {
    const uint4 of_delta = {0, 0x3f800000, 0x3f803f80, 0},
                of_lse = {0x3f803f80, 0x3f80, 0, 0};  // a row of bf16
    shared.ones[threadIdx.x] = threadIdx.x < 8 ? of_delta : threadIdx.x < 16 ? of_lse : uint4{};
    cutlass::arch::fence_view_async_shared();
  }
  if (threadIdx.x == 0) {
    cute::prefetch_tma_descriptor(&params.q);
    cute::prefetch_tma_descriptor(&params.k);
    cute::prefetch_tma_descriptor(&params.v);
    cute::prefetch_tma_descriptor(&params.dout);
    cute::prefetch_tma_descriptor(&params.dk);
    cute::prefetch_tma_descriptor(&params.dv);
    shared.k_full.init(1);
    shared.v_full.init(1);
    for (int stage = 0; stage < kStages; ++stage) {
      shared.q_full[stage].init(1);
      shared.q_empty[stage].init(kCluster * kConsumers * kWarpgroup / 32);
    }
    for (int stage = 0; stage < kDoStages; ++stage) {
      shared.dout_full[stage].init(1);
      shared.dout_empty[stage].init(kCluster * kConsumers * kWarpgroup / 32);
    }
    for (int stage = 0; stage < kDsStages; ++stage) {
      shared.p_full[stage].init(kWarpgroup / 32);
      shared.p_empty[stage].init(kWarpgroup / 32);
      shared.ds_full[stage].init(kWarpgroup / 32);
      shared.ds_empty[stage].init(kCluster * kDqParts * kWarpgroup / 32);
      shared.ds_peer_full[stage].init(1);
    }
    for (int part = 0; part < kDqParts; ++part) {
      for (int adder = 0; adder < kDqAdders; ++adder) {
        shared.dq_full[adder][part].init(kWarpgroup / 32);
      }
      shared.dq_empty[part].init(1);
    }
    cutlass::arch::fence_barrier_init();
  }
  cute::cluster_sync();
  const Tile tile = tile_of(params, blockIdx.x / kCluster);

  const int warpgroup =
      __shfl_sync(0xffffffff, threadIdx.x / kWarpgroup, 0);  // known to be uniform
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    if (threadIdx.x == 0) {
      Loader{params, shared}.run(tile);
    } else if (threadIdx.x % 32 == 0 && threadIdx.x <= 32 * kDqAdders) {
      add_dq(params, shared, tile, threadIdx.x / 32 - 1);
    }
  } else if (warpgroup == 1) {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    Consumer{params, shared, 0}.run_dv(tile);
  } else {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    Consumer{params, shared, 1}.run_dk(tile);
  }
  cute::cluster_sync();  // the other block may still write here, and arrive at these barriers
}

}  // namespace fagen_bwd_fp16_d256_full_m64n64_dss1_intra_c2_kernel

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
  const void* dout;         // fp16 (batch, seqlen_q, heads, 256): the gradient of out
  const void* q;            // fp16 (batch, seqlen_q, heads, 256)
  const void* k;            // fp16 (batch, seqlen_k, kv_heads, 256)
  const void* v;            // fp16 (batch, seqlen_k, kv_heads, 256)
  const void* out;          // fp16 (batch, seqlen_q, heads, 256): the forward pass's
  const void* lse;   // fp32 (batch, heads, seqlen_q): the forward pass's log-sum-exp, natural
                     // logarithm; minus infinity in a row that sees no key
  const void* dlse;  // fp32 (batch, heads, seqlen_q): the gradient of lse; null: 0
  void* dq;          // fp16 (batch, seqlen_q, heads, 256): the gradient of q
  void* dk;          // fp16 (batch, seqlen_k, kv_heads, 256): the gradient of k
  void* dv;          // fp16 (batch, seqlen_k, kv_heads, 256): the gradient of v
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
int fagen_bwd_fp16_d256_full_m64n64_dss1_intra_c2(const struct FagenBackwardArgs* args,
                                                  void* stream);
// How many bytes of workspace a call of these sizes needs; -1 where args is null, or a call of such
// sizes is refused.
int64_t fagen_bwd_fp16_d256_full_m64n64_dss1_intra_c2_workspace(
    const struct FagenBackwardArgs* args);
const char* fagen_bwd_fp16_d256_full_m64n64_dss1_intra_c2_message(int status);
const struct FagenKernelInfo* fagen_bwd_fp16_d256_full_m64n64_dss1_intra_c2_info(void);

}  // extern "C"

// ---- The host's side -------------------------------------------------------------------------

#include "fagen_host.h"
#if FAGEN_HOST_H != 0xa95921b9
#error "the fagen_host.h beside this kernel is that of another version of fagen"
#endif

namespace fagen_bwd_fp16_d256_full_m64n64_dss1_intra_c2_host {

using namespace fagen_bwd_fp16_d256_full_m64n64_dss1_intra_c2_kernel;
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
  if (double(ceil_div(a.seqlen_k, 128) * 2) * double(a.kv_heads) * double(a.batch) >= 1 << 30) {
    return kTooMany;
  }
  if (double(ceil_div(a.seqlen_q, 64)) * double(a.heads) * double(a.batch) >= 1 << 30) {
    return kTooMany;
  }
  return kOk;
}

// Of a call whose sizes are checked, which has fewer than 2^30 of what each record is of.
int64_t workspace_bytes([[maybe_unused]] const FagenBackwardArgs& a) {
  return int64_t(66688) * ceil_div(a.seqlen_q, 64) * a.heads * a.batch + shares_bytes(a);
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
           check_tensor(a.dout, 2, true, false, kMostStride, 256,
                        {{a.batch, a.dout_stride_batch},
                         {a.seqlen_q, a.dout_stride_seq},
                         {a.heads, a.dout_stride_head}}),
           check_tensor(a.q, 2, true, false, kMostStride, 256,
                        {{a.batch, a.q_stride_batch},
                         {a.seqlen_q, a.q_stride_seq},
                         {a.heads, a.q_stride_head}}),
           check_tensor(a.k, 2, true, false, kMostStride, 256,
                        {{a.batch, a.k_stride_batch},
                         {a.seqlen_k, a.k_stride_seq},
                         {a.kv_heads, a.k_stride_head}}),
           check_tensor(a.v, 2, true, false, kMostStride, 256,
                        {{a.batch, a.v_stride_batch},
                         {a.seqlen_k, a.v_stride_seq},
                         {a.kv_heads, a.v_stride_head}}),
           check_tensor(a.out, 2, true, false, kMostStride, 256,
                        {{a.batch, a.out_stride_batch},
                         {a.seqlen_q, a.out_stride_seq},
                         {a.heads, a.out_stride_head}}),
           check_tensor(a.lse, 4, false, false, kMostStride, a.seqlen_q,
                        {{a.batch, a.lse_stride_batch}, {a.heads, a.lse_stride_head}}),
           !a.dlse ? kOk
                   : check_tensor(a.dlse, 4, false, false, kMostStride, a.seqlen_q,
                                  {{a.batch, a.dlse_stride_batch}, {a.heads, a.dlse_stride_head}}),
           check_tensor(a.dq, 2, true, true, kMostStride, 256,
                        {{a.batch, a.dq_stride_batch},
                         {a.seqlen_q, a.dq_stride_seq},
                         {a.heads, a.dq_stride_head}}),
           check_tensor(a.dk, 2, true, true, kMostStride, 256,
                        {{a.batch, a.dk_stride_batch},
                         {a.seqlen_k, a.dk_stride_seq},
                         {a.kv_heads, a.dk_stride_head}}),
           check_tensor(a.dv, 2, true, true, kMostStride, 256,
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
  params.scale = a.scale;

  // LSEs are divided by it, and of less than that nothing is left of S
  params.scale_log2 = std::max(a.scale, 0x1p-100f) * 1.44269504089f;

  const int tile_blocks = kCluster;  // thread blocks of a tile

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

  const int64_t share = kL2Share;

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

  const int grid = int(tiles * tile_blocks);

  const Tensor q{.data = a.seqlen_q > 0 ? a.q : a.k,
                 .sizes = {kHeadDim, a.seqlen_q, a.heads, a.batch},
                 .strides = {a.q_stride_seq, a.q_stride_head, a.q_stride_batch},
                 .box = {kQkSlab, kBlockM, 1, 1},
                 .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                 .type = CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
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
                 .type = CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
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
                 .type = CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
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
                    .type = CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                    .element_bytes = sizeof(Element),
                    .promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B};
  if (!describe(&params.dout, dout)) {
    return kTensorMapRefused;
  }

  const Tensor dk{.data = a.seqlen_k > 0 ? a.dk : a.q,
                  .sizes = {kHeadDim, a.seqlen_k, a.kv_heads, a.batch},
                  .strides = {a.dk_stride_seq, a.dk_stride_head, a.dk_stride_batch},
                  .box = {kQkSlab, kWarpgroupRows, 1, 1},
                  .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                  .type = CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                  .element_bytes = sizeof(Element),
                  .promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B};
  if (!describe(&params.dk, dk)) {
    return kTensorMapRefused;
  }

  const Tensor dv{.data = a.seqlen_k > 0 ? a.dv : a.dout,
                  .sizes = {kHeadDimV, a.seqlen_k, a.kv_heads, a.batch},
                  .strides = {a.dv_stride_seq, a.dv_stride_head, a.dv_stride_batch},
                  .box = {kVSlab, kWarpgroupRows, 1, 1},
                  .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                  .type = CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
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
    by_heads(params, a.heads, a.batch, [&](int heads, int batches) {
      round_dq<<<dim3(m_blocks, heads, batches), kRowThreads, 0, stream>>>(params);
    });
  }
  return cudaGetLastError() == cudaSuccess ? kOk : kLaunchFailed;
}

}  // namespace fagen_bwd_fp16_d256_full_m64n64_dss1_intra_c2_host

extern "C" int fagen_bwd_fp16_d256_full_m64n64_dss1_intra_c2(const FagenBackwardArgs* args,
                                                             void* stream) {
  using namespace fagen_bwd_fp16_d256_full_m64n64_dss1_intra_c2_host;
  const Status status = args ? check(*args) : kNullPointer;
  return status ? status : launch(*args, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t fagen_bwd_fp16_d256_full_m64n64_dss1_intra_c2_workspace(
    const FagenBackwardArgs* args) {
  using namespace fagen_bwd_fp16_d256_full_m64n64_dss1_intra_c2_host;
  return args && !check_sizes(*args) ? workspace_bytes(*args) : -1;
}

extern "C" const char* fagen_bwd_fp16_d256_full_m64n64_dss1_intra_c2_message(int status) {
  using namespace fagen_bwd_fp16_d256_full_m64n64_dss1_intra_c2_host;
  constexpr int kNoKernel = 100;  // of who chooses among kernels
  return status >= 0 && status <= kLaunchFailed ? kMessages[status]
         : status == kNoKernel                  ? "no kernel computes that"
                                                : "unknown status";
}

extern "C" const FagenKernelInfo* fagen_bwd_fp16_d256_full_m64n64_dss1_intra_c2_info(void) {
  using namespace fagen_bwd_fp16_d256_full_m64n64_dss1_intra_c2_kernel;
  static const FagenKernelInfo info = {
      sizeof(FagenKernelInfo),
      kSharedBytes,
      kThreads,
      kLaunchRegisters,
      "bwd_fp16_d256_full_m64n64_dss1_intra_c2",
      "8cffc958c9d546a9952c453af20d8168c5fc112ad88d5a6a459d2783a4ca8257"};
  return &info;
}
// sha256 of what is above: 1aafd810f701902461a73817aa0d99dcafb62320219be7f47d99d191c8045c32
