// bwd_fp16_d128_causal_m64n128_varlen: the gradients of fused attention for Hopper (sm_90a).
// Rendered by fagen; do not edit.
//
//   P = exp(scale * q kᵀ - lse)        dv = Pᵀ dout
//   dP = dout vᵀ                       dS = P (dP - delta), delta = sum(dout * out) of a row
//   dk = scale * dSᵀ q                 dq = scale * dS k
//
// A first kernel works out delta, and a last one rounds dq. Between them a thread block has 128
// keys of one KV head and goes through all rows that see them, 64 at a time, of each query head of
// its group. dk and dv stay in registers; dq is added up in global memory, in fp32.
//
// S and dP lie transposed, keys along the rows: so P and dS are, as they come out of one GEMM, the
// register operands of the next. One producer warp loads by TMA, two add dq up by TMA; 2 consumer
// warpgroups of 64 keys each multiply by WGMMA.
//
// Needs the CUTLASS headers and -gencode=arch=compute_90a,code=sm_90a.

#include <cuda.h>
#include <cuda_runtime.h>
#include <cuda_fp16.h>

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

// ---- The C interface -------------------------------------------------------------------------

#ifndef FAGEN_BACKWARD_VARLEN_ARGS
#define FAGEN_BACKWARD_VARLEN_ARGS 1

extern "C" {

// One varlen call of a kernel of kind backward: the same struct for all of them. Strides are in
// elements; a dimension without one is contiguous.
struct FagenBackwardVarlenArgs {
  uint32_t struct_bytes;  // sizeof(FagenBackwardVarlenArgs)
  uint32_t version;       // 1: callers built for another are recognised
  void* workspace;  // from a multiple of 16 bytes on as large as fagen_<slug>_workspace says; null
                    // where that is nothing
  int64_t workspace_bytes;   // how large it is
  const void* dout;          // fp16 (total_q, heads, 128): the gradient of out
  const void* q;             // fp16 (total_q, heads, 128)
  const void* k;             // fp16 (total_k, kv_heads, 128)
  const void* v;             // fp16 (total_k, kv_heads, 128)
  const void* cu_seqlens_q;  // int32 (offsets): the row of q at which each sequence begins, and the
                             // end of the last; offsets = batch + 1; offsets = batch + 1
  const void* cu_seqlens_k;  // int32 (offsets): the row of k and v at which each sequence begins,
                             // and the end of the last; offsets = batch + 1
  const void* seqused_k;  // int32 (offsets - 1): how many of its keys each sequence sees, the first
                          // ones; null: all. Gradients of the others are 0
  const void* out;        // fp16 (total_q, heads, 128): the forward pass's
  const void* lse;   // fp32 (heads, total_q): the forward pass's log-sum-exp, natural logarithm;
                     // minus infinity in a row that sees no key
  const void* dlse;  // fp32 (heads, total_q): the gradient of lse; null: 0
  void* dq;          // fp16 (total_q, heads, 128): the gradient of q; zeros in a row of no sequence
  void* dk;  // fp16 (total_k, kv_heads, 128): the gradient of k; zeros in a row of no sequence
  void* dv;  // fp16 (total_k, kv_heads, 128): the gradient of v; zeros in a row of no sequence
  int64_t dout_stride_head, dout_stride_seq;
  int64_t q_stride_head, q_stride_seq;
  int64_t k_stride_head, k_stride_seq;
  int64_t v_stride_head, v_stride_seq;
  int64_t out_stride_head, out_stride_seq;
  int64_t lse_stride_head;
  int64_t dlse_stride_head;
  int64_t dq_stride_head, dq_stride_seq;
  int64_t dk_stride_head, dk_stride_seq;
  int64_t dv_stride_head, dv_stride_seq;
  int32_t total_q, total_k, heads, kv_heads, offsets;
  float scale;  // of q kᵀ before the softmax; finite and positive, 1e+08 at most
};

}  // extern "C"

#elif FAGEN_BACKWARD_VARLEN_ARGS != 1
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
int fagen_bwd_fp16_d128_causal_m64n128_varlen(const struct FagenBackwardVarlenArgs* args,
                                              void* stream);
// How many bytes of workspace a call of these sizes needs; -1 where args is null, or a call of such
// sizes is refused.
int64_t fagen_bwd_fp16_d128_causal_m64n128_varlen_workspace(
    const struct FagenBackwardVarlenArgs* args);
const char* fagen_bwd_fp16_d128_causal_m64n128_varlen_message(int status);
const struct FagenKernelInfo* fagen_bwd_fp16_d128_causal_m64n128_varlen_info(void);

}  // extern "C"

namespace fagen_bwd_fp16_d128_causal_m64n128_varlen_kernel {

// ---- The schedule ----------------------------------------------------------------------------

using Element = __half;
using Pair = __half2;
using OutElement = Element;

constexpr int kHeadDim = 128;
constexpr int kHeadDimV = 128;
constexpr int kHeadDimPadded = 128;  // in shared memory, padded with zeros
constexpr int kHeadDimVPadded = 128;
constexpr int kBlockM = 64;    // rows of a step
constexpr int kBlockN = 128;   // keys of a thread block
constexpr int kStages = 2;     // Q buffers
constexpr int kDoStages = 2;   // dO buffers
constexpr int kDsStages = 2;   // dS buffers
constexpr int kConsumers = 2;  // warpgroups of 64 keys
constexpr int kThreads = 384;
constexpr int kLaunchRegisters = 168;
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;
constexpr int kRowThreads = 256;   // of the kernels before and after
constexpr int kRowLanes = 16;      // of those, that share a row
enum : int { kRagged = 1 << 30 };  // rows of a tensor map, where every sequence ends

constexpr int kWarpgroup = 128;
constexpr int kWarpgroupRows = 64;  // the M of every wgmma
constexpr int kStepK = 16;          // the K of every wgmma
constexpr int kDqColumns = 64;      // that a warpgroup computes, of all rows
constexpr int kDqParts = 2;         // warpgroups that compute dQ
constexpr int kDqAdders = 2;        // threads that add it up, in turns
constexpr int kDqSlices = 1;        // in which each hands it on

// Tiles lie in shared memory as slabs: columns of one swizzle span, all rows of a slab together.
constexpr int kQkSlab = 64;  // columns
constexpr int kVSlab = 64;
constexpr int kDsSlab = 64;
constexpr int kQkSwizzleBits = 3;
constexpr int kVSwizzleBits = 3;
constexpr int kDsSwizzleBits = 3;
constexpr auto kQkDescriptor = cute::SM90::GMMA::LayoutType::B128;
constexpr auto kVDescriptor = cute::SM90::GMMA::LayoutType::B128;
constexpr auto kDsDescriptor = cute::SM90::GMMA::LayoutType::B128;

constexpr int kLine = 128;  // of the L2 cache: additions that begin within one take longer

// What there is of a block of rows in the workspace. Each row has two numbers, which tensor cores
// add to products of its: as sums of eight bf16, core matrices of eight rows side by side, first of
// one number and then of the other.
using Statistics = uint4[2 * kBlockM];
struct alignas(kLine) RowBlock {
  float dq[kBlockM * kHeadDimPadded];  // in the order of the threads' accumulators
  // -LSE / scale, and -delta; where a row sees no key -2^127 and 0, so that its P is 0
  Statistics statistics;
  uint32_t added;  // 1 once the first part of dQ is there
};
static_assert(sizeof(RowBlock) == 34944, "the workspace outgrew the plan's formula");

__device__ constexpr int lse_of(int row) {
  return row / 8 * 16 + row % 8;
}
__device__ constexpr int delta_of(int row) {
  return lse_of(row) + 8;
}

// A thread's part of a warpgroup's accumulators.
using Scores = float[kBlockM / 2];  // S, dP: 64 keys by kBlockM rows
using KeyGradient = float[kHeadDimPadded / 2];
using ValueGradient = float[kHeadDimVPadded / 2];
using QueryGradient = float[kDqColumns / 2];
using Packed = uint32_t[kBlockM / 4];  // P, dS in fp16

using Barrier = cutlass::arch::ClusterBarrier;
using TransactionBarrier = cutlass::arch::ClusterTransactionBarrier;

// One of the sequences that lie one after another: how many rows it has and keys it sees, behind
// which of all these it ends, how many keys it holds, seen or not, and the first slot of its blocks
// of rows.
struct Sequence {
  int seqlen_q, seqlen_k, end_q, end_k, held_k, first_slot;
};

struct SharedStorage {
  alignas(1024) Element k[kBlockN * kHeadDimPadded];
  alignas(1024) Element v[kBlockN * kHeadDimVPadded];
  alignas(1024) Element q[kStages][kBlockM * kHeadDimPadded];
  alignas(1024) Element dout[kDoStages][kBlockM * kHeadDimVPadded];
  alignas(1024) Element ds[kDsStages][kBlockN * kBlockM];  // transposed: keys along the rows
  alignas(1024) float dq[kBlockM * kHeadDimPadded / kDqSlices];
  alignas(1024) Statistics statistics[kStages];
  alignas(1024) TransactionBarrier k_full;
  TransactionBarrier v_full;
  TransactionBarrier q_full[kStages], dout_full[kDoStages];
  Barrier q_empty[kStages], dout_empty[kDoStages];
  Barrier dq_full[kDqAdders][kDqParts];  // for each that adds, so that none misses a phase
  Barrier dq_empty[kDqParts];
  Sequence sequence;
};
constexpr int kSharedBytes = sizeof(SharedStorage);
static_assert(kSharedBytes <= 201728, "the layout outgrew the plan's ledger");

template <class Integer>
__host__ __device__ constexpr Integer ceil_div(Integer a, Integer b) {
  return (a + b - 1) / b;
}

// Rows (total, heads, columns) in global memory.
template <class T>
struct Rows {
  T* data;
  int64_t stride_seq, stride_head;

  __device__ __forceinline__ T* at(int row, int head) const {
    return data + row * stride_seq + head * stride_head;
  }
};

// Numbers (heads, total) in global memory.
struct Numbers {
  const float* data;
  int64_t stride_head;

  __device__ __forceinline__ const float* of(int head) const { return data + head * stride_head; }
};

struct Params {
  CUtensorMap q, k, v, dout, dk, dv;
  Rows<const Element> out_rows, dout_rows;
  Rows<Element> dq_rows;
  Numbers lse, dlse;                           // dlse.data may be null
  RowBlock* row_blocks;                        // (heads, m_slots)
  const int32_t *cu_seqlens_q, *cu_seqlens_k;  // where sequences begin, and the last one ends
  const int32_t* seqused_k;       // of how many keys each is to see the first ones; null: of all
  int offsets, total_q, total_k;  // one offset more than there are sequences
  int group;                      // query heads of a KV head
  int m_slots, n_slots;           // for blocks of rows, and of keys, of all sequences; see Slots
  float scale, scale_log2;        // of dQ and dK; of S, times log2(e)
  int first_head;  // of a launch of a kernel before or after, whose grid may not hold all of them

  __device__ __forceinline__ RowBlock& row_block(int head, int slot) const {
    return row_blocks[head * m_slots + slot];  // no memory has room for more than an int counts
  }
};

// Blocks of all sequences have numbers without anyone counting them: sequence i, which begins at
// offsets[i - 1], does so at slot offsets[i - 1] / block + i, which leaves room for the blocks of
// those before it, and now and then for one more. The rows before all sequences are number 0, those
// behind them the last.
template <int block>
struct Slots {
  const int32_t* offsets;
  int count;

  __device__ __forceinline__ int first_of(int sequence) const {
    return sequence > 0 ? first_behind(sequence) : 0;
  }

  // The same of any but number 0.
  __device__ __forceinline__ int first_behind(int sequence) const {
    return max(0, __ldg(offsets + sequence - 1)) / block + sequence;
  }

  // Which sequence a slot is of.
  __device__ __forceinline__ int owner(int slot) const {
    int low = 0, high = count + 1;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first_behind(middle) <= slot) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

// Where a sequence lies. Whatever the lengths say, that is within the tensors. Rows of no sequence
// see no key, and no row sees keys of none.
__device__ __forceinline__ Sequence sequence_of(const Params& params, int index) {
  const bool begins = index > 0, ends = index < params.offsets;
  Sequence sequence;
  sequence.end_q =
      ends ? min(max(0, __ldg(params.cu_seqlens_q + index)), params.total_q) : params.total_q;
  sequence.seqlen_q =
      max(0, sequence.end_q - (begins ? max(0, __ldg(params.cu_seqlens_q + index - 1)) : 0));
  const int first_key = begins ? max(0, __ldg(params.cu_seqlens_k + index - 1)) : 0;
  const int last_key =
      ends ? min(max(0, __ldg(params.cu_seqlens_k + index)), params.total_k) : params.total_k;
  sequence.held_k = max(0, last_key - first_key);
  sequence.seqlen_k = begins && ends ? sequence.held_k : 0;
  if (params.seqused_k && begins && ends) {
    sequence.seqlen_k = min(sequence.held_k, max(0, __ldg(params.seqused_k + index - 1)));
  }
  sequence.end_k = first_key + sequence.seqlen_k;
  sequence.first_slot = Slots<kBlockM>{params.cu_seqlens_q, params.offsets}.first_of(index);
  return sequence;
}

__device__ __forceinline__ int lane() {
  return threadIdx.x % 32;
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const Pair pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Hardware barriers, by number; 0 is __syncthreads.
enum NamedBarrier { kAllConsumers = 1, kStore };

__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- Tiles -----------------------------------------------------------------------------------

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

// The keys first … last - 1 that a row sees; none where last <= first. Both ends rise from row to
// row.
struct Keys {
  int first, last;
};

__device__ __forceinline__ Keys seen_by(const Sequence& sequence, [[maybe_unused]] int row) {
  [[maybe_unused]] const int seqlen_q = sequence.seqlen_q, seqlen_k = sequence.seqlen_k;
  return {0, min(seqlen_k, row + seqlen_k - seqlen_q + 1)};
}

// The first row whose keys end after a key; seqlen_q if there is none.
__device__ __forceinline__ int first_row_past(const Sequence& sequence, int key) {
  int low = 0, high = sequence.seqlen_q;
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (seen_by(sequence, middle).last > key) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// The first block of keys that a block of rows sees.
__device__ __forceinline__ int first_tile_of(const Sequence& sequence,
                                             [[maybe_unused]] int m_block) {
  return 0;
}

// How many blocks of keys it sees any of: so many parts its dQ has.
__device__ __forceinline__ int tiles_of(const Sequence& sequence, int m_block) {
  const int last_row = min((m_block + 1) * kBlockM, sequence.seqlen_q) - 1;
  return max(
      0, ceil_div(seen_by(sequence, last_row).last, kBlockN) - first_tile_of(sequence, m_block));
}

// kBlockN keys of one KV head with all of its query heads, and the blocks first … last - 1 of
// kBlockM rows that see some of them. Of full_first … last - 1 every row sees all.
struct Tile {
  int first_key, kv_head;
  int first_head, last_head;
  int first, full_first, last;
};

// A thread block's tile, and its sequence, of whose keys those that most rows see come first. Where
// its slot has no block of keys first_key is not below held_k.
__device__ __forceinline__ Tile tile_of(const Params& params, Sequence& sequence) {
  const Slots<kBlockN> slots = {params.cu_seqlens_k, params.offsets};
  Tile tile;
  tile.kv_head = blockIdx.x / params.n_slots;
  const int slot = blockIdx.x - tile.kv_head * params.n_slots, index = slots.owner(slot);
  sequence = sequence_of(params, index);
  const int first_slot = slots.first_of(index), m_blocks = ceil_div(sequence.seqlen_q, kBlockM);
  // where offsets fall another may have its first slot: then nobody else may wait for that block
  const bool whole = first_slot <= slot && slots.owner(first_slot) == index;
  tile.first_key = whole ? (slot - first_slot) * kBlockN : sequence.held_k;
  tile.first_head = tile.kv_head * params.group;
  tile.last_head = tile.first_head + params.group;
  const int first_row = first_row_past(sequence, tile.first_key);
  tile.first = first_row < sequence.seqlen_q ? first_row / kBlockM : m_blocks;
  tile.full_first = ceil_div(first_row_past(sequence, tile.first_key + kBlockN - 1), kBlockM);
  tile.last = m_blocks;
  return tile;
}

// Blocks of rows in the order of a tile's steps: from the last to the first. All tiles of a head
// begin with the same, so that the first is ahead of the others.
__device__ __forceinline__ int block_of(const Tile& tile, int step) {
  return tile.last - 1 - step;
}

// ---- Rows, before and after ------------------------------------------------------------------

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

// Before the main kernel: each row's delta = sum of dO * O, less its dLSE, and its LSE; sums of dQ
// begin at none.
__global__ void __launch_bounds__(kRowThreads) prepare_rows(const __grid_constant__ Params params) {
  const Slots<kBlockM> slots = {params.cu_seqlens_q, params.offsets};
  const int slot = blockIdx.x, head = params.first_head + blockIdx.y, index = slots.owner(slot),
            m_block = slot - slots.first_of(index);
  const Sequence sequence = sequence_of(params, index);
  const int begin = sequence.end_q - sequence.seqlen_q;
  RowBlock& block = params.row_block(head, slot);
  if (threadIdx.x == 0) {
    block.added = 0;
  }
  if (m_block < 0 || m_block * kBlockM >= sequence.seqlen_q) {
    return;
  }
  constexpr int kLoad = 16 / sizeof(Element);  // elements
  const int column = threadIdx.x % kRowLanes * kLoad;
#pragma unroll
  for (int row = threadIdx.x / kRowLanes; row < kBlockM; row += kRowThreads / kRowLanes) {
    const int query = m_block * kBlockM + row;
    float delta = 0.f;
    if (query < sequence.seqlen_q && column < kHeadDimV) {
      const uint4 a =
          *reinterpret_cast<const uint4*>(params.out_rows.at(begin + query, head) + column);
      const uint4 b =
          *reinterpret_cast<const uint4*>(params.dout_rows.at(begin + query, head) + column);
#pragma unroll
      for (int i = 0; i < kLoad / 2; ++i) {
        const float2 x = __half22float2(reinterpret_cast<const Pair*>(&a)[i]);
        const float2 y = __half22float2(reinterpret_cast<const Pair*>(&b)[i]);
        delta = fmaf(x.y, y.y, fmaf(x.x, y.x, delta));
      }
    }
#pragma unroll
    for (int other = kRowLanes / 2; other > 0; other /= 2) {
      delta += __shfl_xor_sync(0xffffffff, delta, other);
    }
    if (threadIdx.x % kRowLanes == 0) {
      const float lse = query < sequence.seqlen_q ? params.lse.of(head)[begin + query] : -INFINITY;
      if (lse > -INFINITY && params.dlse.data) {
        delta -= params.dlse.of(head)[begin + query];
      }
      const float reference = lse > -INFINITY ? lse * 1.44269504089f : INFINITY;
      const float subtracted = reference / params.scale_log2;
      block.statistics[lse_of(row)] = in_parts(subtracted > 0x1p127f ? -0x1p127f : -subtracted);
      block.statistics[delta_of(row)] = in_parts(lse > -INFINITY ? -delta : 0.f);
    }
  }
}

// Scale and round the sums of dq.
__global__ void __launch_bounds__(kRowThreads) round_dq(const __grid_constant__ Params params) {
  const Slots<kBlockM> slots = {params.cu_seqlens_q, params.offsets};
  const int slot = blockIdx.x, head = params.first_head + blockIdx.y, index = slots.owner(slot),
            m_block = slot - slots.first_of(index);
  const Sequence sequence = sequence_of(params, index);
  const int begin = sequence.end_q - sequence.seqlen_q;
  if (m_block < 0 || m_block * kBlockM >= sequence.seqlen_q) {
    return;
  }
  const float4* sums = reinterpret_cast<const float4*>(params.row_block(head, slot).dq);
  const float scale = params.scale;
  const bool seen = tiles_of(sequence, m_block) > 0;  // nobody has sums of rows that see no key
  __shared__ Pair rounded[kBlockM][kHeadDimPadded / 2 + 4];
  for (int i = threadIdx.x; i < kBlockM * kHeadDimPadded / 4; i += kRowThreads) {
    // four neighbours of a thread's accumulator: two columns of a row, and of that eight below
    const int thread = i % kWarpgroup, eight = i / kWarpgroup % (kDqColumns / 8),
              warpgroup = i / (kWarpgroup * kDqColumns / 8);
    const int row = thread / 32 * 16 + thread % 32 / 4;
    const int pair = warpgroup * kDqColumns / 2 + eight * 4 + thread % 4;
    const float4 sum = seen ? sums[i] : float4{};
    rounded[row][pair] = __floats2half2_rn(sum.x * scale, sum.y * scale);
    rounded[row + 8][pair] = __floats2half2_rn(sum.z * scale, sum.w * scale);
  }
  __syncthreads();
  constexpr int kLoads = kHeadDim * sizeof(Element) / 16;  // of a row
  for (int i = threadIdx.x; i < kBlockM * kLoads; i += kRowThreads) {
    const int row = i / kLoads, query = m_block * kBlockM + row;
    if (query < sequence.seqlen_q) {
      reinterpret_cast<uint4*>(params.dq_rows.at(begin + query, head))[i % kLoads] =
          *reinterpret_cast<const uint4*>(&rounded[row][i % kLoads * 4]);
    }
  }
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
__device__ __forceinline__ void wgmma_statistics(float (&c)[32], const uint32_t* a, Descriptor b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{ %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31 }, "
      "{ %32, %33, %34, %35 }, %36, %37, 1, 1, 0;"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]),
        "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]),
        "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]),
        "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()), "n"(accumulate ? 1 : 0));
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
__device__ __forceinline__ void wgmma_dv(float (&c)[64], const uint32_t* a, Descriptor b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
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

// ---- Loading, and adding dQ up ---------------------------------------------------------------

// Copies tiles from global to shared memory. Used by a single thread.
struct Loader {
  const Params& params;
  SharedStorage& shared;

  // One box per slab; rows past the sequence and columns past the head dim are filled with zeros.
  template <int columns, int rows, int slab>
  __device__ __forceinline__ void copy(const CUtensorMap& map, TransactionBarrier& full,
                                       Element* tile, int row, int head, int seqlen, int end,
                                       cute::TMA::CacheHintSm90 hint) {
#pragma unroll 1  // few registers
    for (int column = 0; column < columns; column += slab) {
      cute::SM90_TMA_LOAD_5D::copy(&map, reinterpret_cast<uint64_t*>(&full),
                                   static_cast<uint64_t>(hint), tile + column * rows, column,
                                   kRagged - seqlen + row, head, kRagged, end);
    }
  }

  __device__ __forceinline__ void copy(const Statistics& numbers, TransactionBarrier& full,
                                       Statistics& to) {
    cute::SM90_BULK_COPY_G2S::copy(numbers, reinterpret_cast<uint64_t*>(&full), to,
                                   sizeof(Statistics));
  }

  __device__ __forceinline__ void load_keys(const Tile& tile) {
    constexpr auto kOnce = cute::TMA::CacheHintSm90::EVICT_FIRST;
    shared.k_full.arrive_and_expect_tx(sizeof(shared.k));
    copy<kHeadDimPadded, kBlockN, kQkSlab>(params.k, shared.k_full, shared.k, tile.first_key,
                                           tile.kv_head, shared.sequence.seqlen_k,
                                           shared.sequence.end_k, kOnce);
    shared.v_full.arrive_and_expect_tx(sizeof(shared.v));
    copy<kHeadDimVPadded, kBlockN, kVSlab>(params.v, shared.v_full, shared.v, tile.first_key,
                                           tile.kv_head, shared.sequence.seqlen_k,
                                           shared.sequence.end_k, kOnce);
  }

  __device__ __forceinline__ void run(const Tile& tile) {
    constexpr auto kAgain = cute::TMA::CacheHintSm90::EVICT_LAST;
    RingPosition<kStages> q;
    RingPosition<kDoStages> dout;
    load_keys(tile);
    for (int head = tile.first_head; head < tile.last_head; ++head) {
#pragma unroll 1
      for (int step = 0; step < tile.last - tile.first; ++step) {
        const int block = block_of(tile, step);
        const RowBlock& rows = params.row_block(head, shared.sequence.first_slot + block);
        shared.q_empty[q.stage].wait(q.phase ^ 1);
        shared.q_full[q.stage].arrive_and_expect_tx(sizeof(shared.q[0]) +
                                                    sizeof(shared.statistics[0]));
        copy<kHeadDimPadded, kBlockM, kQkSlab>(params.q, shared.q_full[q.stage], shared.q[q.stage],
                                               block * kBlockM, head, shared.sequence.seqlen_q,
                                               shared.sequence.end_q, kAgain);
        copy(rows.statistics, shared.q_full[q.stage], shared.statistics[q.stage]);
        q.advance();
        shared.dout_empty[dout.stage].wait(dout.phase ^ 1);
        shared.dout_full[dout.stage].arrive_and_expect_tx(sizeof(shared.dout[0]));
        copy<kHeadDimVPadded, kBlockM, kVSlab>(
            params.dout, shared.dout_full[dout.stage], shared.dout[dout.stage], block * kBlockM,
            head, shared.sequence.seqlen_q, shared.sequence.end_q, kAgain);
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

// How many numbers of dQ a warpgroup has.
__device__ constexpr int dq_part(int part) {
  return kWarpgroupRows * kDqColumns;
}

// Which of the parts of a block of rows a tile has: so many come before it.
__device__ __forceinline__ int turn_of(const Sequence& sequence, const Tile& tile, int block) {
  return tile.first_key / (kBlockN)-first_tile_of(sequence, block);
}

// The first part of dQ is stored, so that nobody has to clear the sum, and the others are added in
// any order. A tile waits for tiles only that were launched before it. Used by two threads of
// different warps, which take turns: one looks whether the first part is there while the other
// adds.
__device__ __forceinline__ void add_dq(const Params& params, SharedStorage& shared,
                                       const Tile& tile, int adder) {
  Barrier* const full = shared.dq_full[adder];
  uint32_t phase = 0;
  const int steps = tile.last - tile.first;
  int step = adder;
  for (int head = tile.first_head; head < tile.last_head; ++head) {
#pragma unroll 1  // few registers
    for (; step < steps; step += kDqAdders) {
      const int block = block_of(tile, step), turn = turn_of(shared.sequence, tile, block);
      RowBlock& rows = params.row_block(head, shared.sequence.first_slot + block);
      float* const sums = rows.dq;
      uint32_t* const added = &rows.added;
      await_count(added, min(turn, 1));  // before the part is there
#pragma unroll
      for (int slice = 0; slice < kDqSlices; ++slice) {
#pragma unroll
        for (int part = 0; part < kDqParts; ++part) {
          full[part].wait(phase);
          const int begin = part * dq_part(0), count = dq_part(part) / kDqSlices;
          float* const to = sums + begin + slice * count;
          const float* const from = shared.dq + begin / kDqSlices;
          if (turn == 0) {
            bulk_store(to, from, count * sizeof(float));
          } else {
            bulk_add(to, from, count * sizeof(float));
          }
        }
        cute::tma_store_arrive();
        cute::tma_store_wait<0>();  // it has been read
#pragma unroll
        for (int part = 0; part < kDqParts; ++part) {
          shared.dq_empty[part].arrive();
        }
      }
      phase ^= 1;
      if (turn == 0) {
        await_additions();
        release(added);
      }
    }
    step -= steps;
  }
  await_additions();
}

// ---- Multiplying -----------------------------------------------------------------------------

// A warp has 16 of an accumulator's 64 rows, from warp_row() on.
__device__ __forceinline__ int warp_row() {
  return threadIdx.x % kWarpgroup / 32 * 16;
}

// A thread has two of them, thread_row() and eight below: element i is in row i / 2 % 2 and in
// column i / 4 * 8 + i % 2, counted from 2 * (lane % 4). Four lanes share a row.
__device__ __forceinline__ int thread_row() {
  return warp_row() + lane() / 4;
}
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

// What the warpgroups that multiply have in common.
struct Warpgroup {
  const Params& params;
  SharedStorage& shared;
  const int warpgroup;  // 0 … kConsumers - 1
  RingPosition<kStages> q;

  __device__ __forceinline__ void advance() { q.advance(); }

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
    const Descriptor rows = descriptor<kVSlab>(shared.dout[q.stage], kVDescriptor);
#pragma unroll
    for (int d = 0; d < kHeadDimVPadded; d += kStepK) {
      wgmma_scores<true>(dp, keys + column_offset<kBlockN, kVSlab>(d),
                         rows + column_offset<kBlockM, kVSlab>(d));
    }
    wgmma_commit();
  }

  // Issues dV += P dO.
  __device__ __forceinline__ void issue_dv(ValueGradient& dv, Packed& p) {
    const Descriptor rows = along_columns<kBlockM, kVSlab>(shared.dout[q.stage], kVDescriptor);
    fence_operand(p);
    fence_operand(dv);
    wgmma_fence();
#pragma unroll
    for (int row = 0; row < kBlockM; row += kStepK) {
      wgmma_dv<true>(dv, p + row / 4, rows + row_offset<kVSlab>(row));
    }
    wgmma_commit();
  }

  // Issues dK += dS Q.
  __device__ __forceinline__ void issue_dk(KeyGradient& dk, Packed& p) {
    const Descriptor rows = along_columns<kBlockM, kQkSlab>(shared.q[q.stage], kQkDescriptor);
    fence_operand(p);
    fence_operand(dk);
    wgmma_fence();
#pragma unroll
    for (int row = 0; row < kBlockM; row += kStepK) {
      wgmma_dv<true>(dk, p + row / 4, rows + row_offset<kQkSlab>(row));
    }
    wgmma_commit();
  }

  // Issues dQ = dS K: of some rows, or some columns of K.
  template <int count>
  __device__ __forceinline__ void issue_dq(float (&dq)[count], const Element* rows,
                                           const Element* columns) {
    const Descriptor a = along_columns<kBlockN, kDsSlab>(rows, kDsDescriptor);
    const Descriptor b = along_columns<kBlockN, kQkSlab>(columns, kQkDescriptor);
    fence_operand(dq);
    wgmma_fence();
    wgmma_dq<false>(dq, a, b);
#pragma unroll
    for (int key = kStepK; key < kBlockN; key += kStepK) {
      wgmma_dq<true>(dq, a + row_offset<kDsSlab>(key), b + row_offset<kQkSlab>(key));
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
        const Keys seen = seen_by(shared.sequence, row + column_of(i));
        const int own = key + row_of(i) * 8;
        if (own >= seen.last) {
          s[i] = 0.f;
        }
      }
    }
  }

  // dS = P (dP - delta), in place of dP - delta.
  __device__ __forceinline__ void differentiate(const Scores& p, Scores& dp) {
#pragma unroll
    for (int i = 0; i < kBlockM / 2; ++i) {
      dp[i] *= p[i];
    }
  }

  __device__ __forceinline__ void pack_scores(Packed& packed, const Scores& s) {
#pragma unroll
    for (int i = 0; i < kBlockM / 4; ++i) {
      packed[i] = pack(s[2 * i], s[2 * i + 1]);
    }
  }

  // A warp's 16 rows of dS, for the GEMM that needs it from shared memory.
  __device__ __forceinline__ void store_ds(const Packed& packed) {
    const int row = first_row() + warp_row() + lane() % 16;
#pragma unroll
    for (int column = 0; column < kBlockM; column += 16) {
      char* slab =
          reinterpret_cast<char*>(shared.ds[q.stage] + column / kDsSlab * kBlockN * kDsSlab);
      const uint32_t* four = packed + column / 4;
      store_matrices(
          slab + swizzled<kDsSlab, kDsSwizzleBits>(row, column % kDsSlab + lane() / 16 * 8),
          four[0], four[1], four[2], four[3]);
    }
  }

  // Hands a part of dQ to the warp that adds it up.
  template <int count>
  __device__ __forceinline__ void pass_dq_on(const float (&dq)[count], int part) {
    float4* to = reinterpret_cast<float4*>(shared.dq) +
                 part * kWarpgroup * kDqColumns / 8 / kDqSlices + threadIdx.x % kWarpgroup;
    shared.dq_empty[part].wait(q.stage ^ 1);  // the first step finds it empty
#pragma unroll
    for (int i = 0; i < count; i += 4) {
      to[i / 4 * kWarpgroup] = {dq[i], dq[i + 1], dq[i + 2], dq[i + 3]};
    }
    cutlass::arch::fence_view_async_shared();
    arrive(shared.dq_full[q.stage][part]);
  }

  // Rounds 64 rows of a gradient and stores them through the shared memory of what it is the
  // gradient of.
  template <int columns, int slab, int swizzle_bits, int count>
  __device__ __forceinline__ void store(const CUtensorMap& map, Element* space,
                                        const float (&gradient)[count], float scale,
                                        const Tile& tile) {
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
    barrier_sync(kStore + warpgroup, kWarpgroup);
    if (threadIdx.x % kWarpgroup == 0) {
#pragma unroll
      for (int column = 0; column < columns; column += slab) {
        const Sequence& of =
            shared.sequence;  // of keys that are not seen the gradient is stored too
        cute::SM90_TMA_STORE_5D::copy(&map, space + (column / slab * kBlockN + first_row()) * slab,
                                      column, kRagged - of.held_k + tile.first_key + first_row(),
                                      tile.kv_head, kRagged, of.end_k - of.seqlen_k + of.held_k);
      }
      cute::tma_store_arrive();
    }
  }

  __device__ __forceinline__ void finish() {
    if (threadIdx.x % kWarpgroup == 0) {
      cute::tma_store_wait<0>();  // shared memory must outlive the copies from it
    }
  }
};

// One warpgroup: 64 keys of the tile.
struct Consumer : Warpgroup {
  // One block of rows.
  template <bool masked>
  __device__ __forceinline__ void step(const Tile& tile, int block, KeyGradient& dk,
                                       ValueGradient& dv) {
    Scores s, dp;
    shared.q_full[q.stage].wait(q.phase);
    issue_statistics(s, dp);
    issue_scores(s, q.stage);
    shared.dout_full[q.stage].wait(q.phase);
    wgmma_fence();  // the wait may have been a loop
    issue_dp(dp);
    wgmma_wait<1>();
    fence_operand(s);
    exponentiate<masked>(tile, block, s);
    wgmma_wait<0>();
    fence_operand(dp);
    differentiate(s, dp);
    Packed p, d_scores;
    pack_scores(p, s);
    pack_scores(d_scores, dp);
    store_ds(d_scores);
    issue_dv(dv, p);
    cutlass::arch::fence_view_async_shared();
    barrier_sync(kAllConsumers, kConsumers * kWarpgroup);
    QueryGradient dq;
    issue_dq(dq, shared.ds[q.stage], shared.k + warpgroup * kDqColumns * kBlockN);
    wgmma_wait<1>();
    fence_operand(dv);
    arrive(shared.dout_empty[q.stage]);
    issue_dk(dk, d_scores);
    wgmma_wait<1>();
    fence_operand(dq);
    pass_dq_on(dq, warpgroup);
    wgmma_wait<0>();
    fence_operand(dk);
    arrive(shared.q_empty[q.stage]);
    advance();
  }

  // Whether no row of a block sees any of its 64 keys.
  __device__ __forceinline__ bool sees_none(const Tile& tile, int block) const {
    return seen_by(shared.sequence, (block + 1) * kBlockM - 1).last <= tile.first_key + first_row();
  }

  // A block of which that is so: others' dS, and nothing of its own.
  __device__ __forceinline__ void pass() {
    shared.q_full[q.stage].wait(q.phase);  // what is not there yet cannot be given back
    shared.dout_full[q.stage].wait(q.phase);
    arrive(shared.dout_empty[q.stage]);
    const Packed nothing = {};
    store_ds(nothing);
    cutlass::arch::fence_view_async_shared();
    barrier_sync(kAllConsumers, kConsumers * kWarpgroup);
    QueryGradient dq;
    issue_dq(dq, shared.ds[q.stage], shared.k + warpgroup * kDqColumns * kBlockN);
    wgmma_wait<0>();
    fence_operand(dq);
    pass_dq_on(dq, warpgroup);
    arrive(shared.q_empty[q.stage]);
    advance();
  }

  __device__ __forceinline__ void run(const Tile& tile) {
    KeyGradient dk = {};
    ValueGradient dv = {};
    shared.k_full.wait(0);
    shared.v_full.wait(0);
    for (int head = tile.first_head; head < tile.last_head; ++head) {
      int block = tile.last - 1;
      for (; block >= max(tile.full_first, tile.first); --block) {
        step<false>(tile, block, dk, dv);
      }
      for (; block >= tile.first; --block) {
        if (sees_none(tile, block)) {
          pass();
        } else {
          step<true>(tile, block, dk, dv);
        }
      }
    }
    barrier_sync(kAllConsumers, kConsumers * kWarpgroup);  // K has been read, and V
    store<kHeadDimVPadded, kVSlab, kVSwizzleBits>(params.dv, shared.v, dv, 1.f, tile);
    store<kHeadDimPadded, kQkSlab, kQkSwizzleBits>(params.dk, shared.k, dk, params.scale, tile);
    finish();
  }
};

// ---- The kernel ------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads, 1)
    attention_backward(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  Sequence sequence;
  const Tile tile = tile_of(params, sequence);
  if (tile.first_key >= sequence.held_k) {
    return;
  }

  if (threadIdx.x == 0) {
    shared.sequence = sequence;
    for (const CUtensorMap* map :
         {&params.q, &params.k, &params.v, &params.dout, &params.dk, &params.dv}) {
      cute::prefetch_tma_descriptor(map);
    }
    shared.k_full.init(1);
    shared.v_full.init(1);
    for (int stage = 0; stage < kStages; ++stage) {
      shared.q_full[stage].init(1);
      shared.q_empty[stage].init(kConsumers * kWarpgroup / 32);
    }
    for (int stage = 0; stage < kDoStages; ++stage) {
      shared.dout_full[stage].init(1);
      shared.dout_empty[stage].init(kConsumers * kWarpgroup / 32);
    }
    for (int part = 0; part < kDqParts; ++part) {
      for (int adder = 0; adder < kDqAdders; ++adder) {
        shared.dq_full[adder][part].init(kWarpgroup / 32);
      }
      shared.dq_empty[part].init(1);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();

  const int warpgroup =
      __shfl_sync(0xffffffff, threadIdx.x / kWarpgroup, 0);  // known to be uniform
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    if (threadIdx.x == 0) {
      Loader{params, shared}.run(tile);
    } else if (threadIdx.x % 32 == 0 && threadIdx.x <= 32 * kDqAdders) {
      add_dq(params, shared, tile, threadIdx.x / 32 - 1);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    Consumer{{params, shared, warpgroup - 1}}.run(tile);
  }
}

}  // namespace fagen_bwd_fp16_d128_causal_m64n128_varlen_kernel

// ---- The host's side -------------------------------------------------------------------------

namespace fagen_bwd_fp16_d128_causal_m64n128_varlen_host {

using namespace fagen_bwd_fp16_d128_causal_m64n128_varlen_kernel;

// What a call ends with: the number of its message. Checks come in this order.
enum Status {
  kOk,
  kWrongStruct,
  kBadSize,
  kBadRatio,
  kTooMany,
  kBadScalar,
  kRefused,
  kNullPointer,
  kMisaligned,
  kBadStride,
  kOverlap,
  kBadWorkspace,
  kNotHopper,
  kNoDriver,
  kTensorMapRefused,
  kLaunchFailed
};

constexpr const char* kMessages[] = {
    "launched",
    "struct_bytes or version is that of another FagenBackwardVarlenArgs",
    "a size is negative or too large",
    "heads must be a multiple of kv_heads",
    "there are 2^30 tiles or blocks of rows or more",
    "scale must be finite and positive, scale 1e+08 at most",
    "a tensor is given that cannot be",
    "a tensor that is needed is null",
    "a tensor does not begin at a multiple of 16 bytes (cu_seqlens_q: 4, cu_seqlens_k: 4, seqused_k: 4, lse: 4, dlse: 4)",
    "a stride is negative, too large, or no multiple of 16 bytes",
    "elements of an output (dq, dk, dv) overlap: a stride is 0 or too small",
    "the workspace is null, too small, or does not begin at a multiple of 16 bytes",
    "the current device is not a Hopper GPU (compute capability 9.0)",
    "the CUDA driver is missing, or too old for tensor maps",
    "the CUDA driver refused to describe a tensor for TMA",
    "the kernel could not be launched",
};

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

constexpr int64_t kMostStride = int64_t(1) << 38;  // TMA's end below 2^40 bytes

// A dimension of a tensor whose elements do not lie side by side.
struct Dim {
  int64_t size, stride;
};

// A tensor as the caller laid it out: elements that lie side by side, and its other dimensions.
// TMA, or accesses of 16 bytes, follow an aligned one. No two elements of one that is written may
// be one.
Status check(const void* data, int element_bytes, bool aligned, bool written, int64_t most,
             int64_t row, std::initializer_list<Dim> dims) {
  bool empty = row == 0, strides_fit = true, overlaps = false;
  double reach = double(row);  // elements from the first one to the last
  for (const Dim& dim : dims) {
    empty |= dim.size == 0;
    if (dim.size > 1) {
      strides_fit &= dim.stride >= 0 && dim.stride <= most &&
                     (!aligned || dim.stride * element_bytes % 16 == 0);
      double within = double(row);  // the reach of what this dimension steps over
      for (const Dim& other : dims) {
        const bool shorter =
            other.stride < dim.stride || (other.stride == dim.stride && &other < &dim);
        within += other.size > 1 && shorter ? double(other.size - 1) * double(other.stride) : 0;
      }
      overlaps |= written && double(dim.stride) < within;
      reach += double(dim.size - 1) * double(dim.stride);
    }
  }
  if (!data || empty) {
    return empty ? kOk : kNullPointer;
  }
  if (reinterpret_cast<uintptr_t>(data) % (aligned ? 16 : element_bytes) != 0) {
    return kMisaligned;
  }
  return !strides_fit || reach * element_bytes >= 0x1p62 ? kBadStride : overlaps ? kOverlap : kOk;
}

// Whether sizes go together, and are not too large.
Status check_sizes(const FagenBackwardVarlenArgs& a) {
  for (const int size : {a.total_q, a.total_k, a.heads, a.kv_heads, a.offsets}) {
    if (size < 0 || size > 1073741824) {
      return kBadSize;
    }
  }
  if (a.kv_heads == 0 ? a.heads != 0 : a.heads % a.kv_heads != 0) {
    return kBadRatio;
  }
  if (double(ceil_div(a.total_k, 128) + a.offsets) * double(a.kv_heads) >= 1 << 30) {
    return kTooMany;
  }
  if (double(ceil_div(a.total_q, 64) + a.offsets) * double(a.heads) >= 1 << 30) {
    return kTooMany;
  }
  return kOk;
}

// Of a call whose sizes are checked, which has fewer than 2^30 of what each record is of.
int64_t workspace_bytes([[maybe_unused]] const FagenBackwardVarlenArgs& a) {
  return int64_t(ceil_div(a.total_q, 64) + a.offsets) * a.heads * 34944;
}

Status check(const FagenBackwardVarlenArgs& a) {
  if (a.struct_bytes != sizeof(a) || a.version != FAGEN_BACKWARD_VARLEN_ARGS) {
    return kWrongStruct;
  }
  if (const Status status = check_sizes(a)) {
    return status;
  }
  if (!(a.scale > 0) || !std::isfinite(a.scale) || a.scale > 100000000.0) {
    return kBadScalar;
  }
  for (const Status status :
       {check(a.dout, 2, true, false, 4294967296, 128,
              {{a.total_q, a.dout_stride_seq}, {a.heads, a.dout_stride_head}}),
        check(a.q, 2, true, false, 4294967296, 128,
              {{a.total_q, a.q_stride_seq}, {a.heads, a.q_stride_head}}),
        check(a.k, 2, true, false, 4294967296, 128,
              {{a.total_k, a.k_stride_seq}, {a.kv_heads, a.k_stride_head}}),
        check(a.v, 2, true, false, 4294967296, 128,
              {{a.total_k, a.v_stride_seq}, {a.kv_heads, a.v_stride_head}}),
        check(a.cu_seqlens_q, 4, false, false, kMostStride, a.offsets, {}),
        check(a.cu_seqlens_k, 4, false, false, kMostStride, a.offsets, {}),
        !a.seqused_k ? kOk : check(a.seqused_k, 4, false, false, kMostStride, a.offsets - 1, {}),
        check(a.out, 2, true, false, 4294967296, 128,
              {{a.total_q, a.out_stride_seq}, {a.heads, a.out_stride_head}}),
        check(a.lse, 4, false, false, kMostStride, a.total_q, {{a.heads, a.lse_stride_head}}),
        !a.dlse ? kOk
                : check(a.dlse, 4, false, false, kMostStride, a.total_q,
                        {{a.heads, a.dlse_stride_head}}),
        check(a.dq, 2, true, true, 4294967296, 128,
              {{a.total_q, a.dq_stride_seq}, {a.heads, a.dq_stride_head}}),
        check(a.dk, 2, true, true, 4294967296, 128,
              {{a.total_k, a.dk_stride_seq}, {a.kv_heads, a.dk_stride_head}}),
        check(a.dv, 2, true, true, 4294967296, 128,
              {{a.total_k, a.dv_stride_seq}, {a.kv_heads, a.dv_stride_head}})}) {
    if (status) {
      return status;
    }
  }
  const int64_t needed = workspace_bytes(a);
  const bool misplaced = reinterpret_cast<uintptr_t>(a.workspace) % 16 != 0;
  return needed > 0 && (!a.workspace || a.workspace_bytes < needed || misplaced) ? kBadWorkspace
                                                                                 : kOk;
}

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// Found at run time, so that the library loads where there is no driver.
EncodeTiled encode_tiled() {
  static const EncodeTiled found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess
               ? reinterpret_cast<EncodeTiled>(function)
               : nullptr;
  }();
  return found;
}

// SMs of the current device, once the kernel is configured for it; 0 if it is no Hopper GPU.
int prepare_device() {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) {
    return 0;
  }
  if (device < kDevices && known[device].load(std::memory_order_acquire) > 0) {
    return known[device].load(std::memory_order_relaxed);
  }
  int major = 0, minor = 0, multiprocessors = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (major != 9 || minor != 0 ||
      cudaFuncSetAttribute(attention_backward, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           sizeof(SharedStorage)) != cudaSuccess) {
    return 0;
  }
  if (device < kDevices) {
    known[device].store(multiprocessors, std::memory_order_release);
  }
  return multiprocessors;
}

// A tensor whose rows are those of many sequences, one after the other, and the boxes of one head
// that TMA copies.
struct Tensor {
  const void* data;
  int64_t sizes[3];    // columns, rows, heads
  int64_t strides[2];  // of all but the columns
  int box[2];          // columns, rows
  CUtensorMapSwizzle swizzle;
  CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  int64_t element_bytes = sizeof(Element);
};

// The map has kRagged rows, of which each sequence takes the last ones: row r of `length` is row
// kRagged - length + r, and what a box has beyond the end is outside of the map, whatever lies
// there. Two more dimensions lead to where the sequence is: kRagged in one goes as many rows back,
// by a stride that makes 2^64 of them wrap around to zero, and in the other the row behind the
// sequence goes forward.
bool describe(CUtensorMap* map, const Tensor& t) {
  const int64_t row = t.sizes[1] <= 1 ? 16 : t.strides[0] * t.element_bytes;
  const int64_t head = t.sizes[2] <= 1 ? 16 : t.strides[1] * t.element_bytes;
  const int64_t wrapping = (int64_t(1) << 34) * t.element_bytes;
  const cuuint64_t sizes[5] = {cuuint64_t(t.sizes[0]), kRagged, cuuint64_t(t.sizes[2]), INT32_MAX,
                               INT32_MAX};
  const cuuint64_t strides[4] = {cuuint64_t(row), cuuint64_t(head), cuuint64_t(wrapping - row),
                                 cuuint64_t(row)};
  const cuuint32_t box[5] = {cuuint32_t(t.box[0]), cuuint32_t(t.box[1]), 1, 1, 1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  return encode_tiled()(map, t.type, 5, const_cast<void*>(t.data), sizes, strides, box, steps,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, t.swizzle,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

constexpr int kMostGrid = 65535;  // thread blocks in y and z

// Launches a kernel for some heads after others, where a grid does not hold all of them.
template <class Launch>
void by_heads(Params& params, int heads, const Launch& launch) {
  for (params.first_head = 0; params.first_head < heads; params.first_head += kMostGrid) {
    launch(std::min(heads - params.first_head, kMostGrid));
  }
}

Status launch(const FagenBackwardVarlenArgs& a, cudaStream_t stream) {
  if (a.heads == 0) {
    return kOk;
  }
  // How many blocks there are the GPU finds out: there is a thread block for each slot of one.
  const int64_t m_slots = a.total_q ? ceil_div(a.total_q, kBlockM) + a.offsets : 0;
  const int64_t n_slots = a.total_k ? ceil_div(a.total_k, kBlockN) + a.offsets : 0;
  const int64_t tiles = n_slots * a.kv_heads;
  if (prepare_device() == 0) {
    return kNotHopper;
  }
  if (!encode_tiled()) {
    return kNoDriver;
  }

  const auto queries = [&](const void* data, int columns, int64_t seq, int64_t head, int slab,
                           CUtensorMapSwizzle swizzle) {
    return Tensor{.data = data,
                  .sizes = {columns, a.total_q, a.heads},
                  .strides = {seq, head},
                  .box = {slab, kBlockM},
                  .swizzle = swizzle};
  };
  const auto keys = [&](const void* data, int columns, int64_t seq, int64_t head, int slab,
                        int rows, CUtensorMapSwizzle swizzle) {
    return Tensor{.data = data,
                  .sizes = {columns, a.total_k, a.kv_heads},
                  .strides = {seq, head},
                  .box = {slab, rows},
                  .swizzle = swizzle};
  };
  Tensor q =
      queries(a.q, kHeadDim, a.q_stride_seq, a.q_stride_head, kQkSlab, CU_TENSOR_MAP_SWIZZLE_128B);
  Tensor dout = queries(a.dout, kHeadDimV, a.dout_stride_seq, a.dout_stride_head, kVSlab,
                        CU_TENSOR_MAP_SWIZZLE_128B);
  const Tensor k = keys(a.k, kHeadDim, a.k_stride_seq, a.k_stride_head, kQkSlab, kBlockN,
                        CU_TENSOR_MAP_SWIZZLE_128B);
  const Tensor v = keys(a.v, kHeadDimV, a.v_stride_seq, a.v_stride_head, kVSlab, kBlockN,
                        CU_TENSOR_MAP_SWIZZLE_128B);
  const Tensor dk = keys(a.dk, kHeadDim, a.dk_stride_seq, a.dk_stride_head, kQkSlab, kWarpgroupRows,
                         CU_TENSOR_MAP_SWIZZLE_128B);
  const Tensor dv = keys(a.dv, kHeadDimV, a.dv_stride_seq, a.dv_stride_head, kVSlab, kWarpgroupRows,
                         CU_TENSOR_MAP_SWIZZLE_128B);
  if (a.total_q == 0) {
    q = k;  // never read, but a tensor map cannot be empty
    dout = v;
  }

  Params params;
  params.out_rows = {static_cast<const Element*>(a.out), a.out_stride_seq, a.out_stride_head};
  params.dout_rows = {static_cast<const Element*>(a.dout), a.dout_stride_seq, a.dout_stride_head};
  params.dq_rows = {static_cast<Element*>(a.dq), a.dq_stride_seq, a.dq_stride_head};
  params.lse = {static_cast<const float*>(a.lse), a.lse_stride_head};
  params.dlse = {static_cast<const float*>(a.dlse), a.dlse_stride_head};
  params.row_blocks = static_cast<RowBlock*>(a.workspace);
  params.cu_seqlens_q = static_cast<const int32_t*>(a.cu_seqlens_q);
  params.cu_seqlens_k = static_cast<const int32_t*>(a.cu_seqlens_k);
  params.seqused_k = static_cast<const int32_t*>(a.seqused_k);
  params.offsets = a.offsets;
  params.total_q = a.total_q;
  params.total_k = a.total_k;
  params.group = a.heads / a.kv_heads;
  params.m_slots = int(m_slots);
  params.n_slots = int(n_slots);
  params.scale = a.scale;
  // LSEs are divided by it, and of less than that nothing is left of S
  params.scale_log2 = std::max(a.scale, 0x1p-100f) * 1.44269504089f;

  if (m_slots > 0) {
    by_heads(params, a.heads, [&](int heads) {
      prepare_rows<<<dim3(m_slots, heads), kRowThreads, 0, stream>>>(params);
    });
  }
  if (tiles > 0) {
    if (!describe(&params.q, q) || !describe(&params.k, k) || !describe(&params.v, v) ||
        !describe(&params.dout, dout) || !describe(&params.dk, dk) || !describe(&params.dv, dv)) {
      return kTensorMapRefused;
    }
    attention_backward<<<int(tiles), kThreads, sizeof(SharedStorage), stream>>>(params);
  }
  if (m_slots > 0) {
    by_heads(params, a.heads, [&](int heads) {
      round_dq<<<dim3(m_slots, heads), kRowThreads, 0, stream>>>(params);
    });
  }
  return cudaGetLastError() == cudaSuccess ? kOk : kLaunchFailed;
}

}  // namespace fagen_bwd_fp16_d128_causal_m64n128_varlen_host

extern "C" int fagen_bwd_fp16_d128_causal_m64n128_varlen(const FagenBackwardVarlenArgs* args,
                                                         void* stream) {
  using namespace fagen_bwd_fp16_d128_causal_m64n128_varlen_host;
  const Status status = args ? check(*args) : kNullPointer;
  return status ? status : launch(*args, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t fagen_bwd_fp16_d128_causal_m64n128_varlen_workspace(
    const FagenBackwardVarlenArgs* args) {
  using namespace fagen_bwd_fp16_d128_causal_m64n128_varlen_host;
  return args && !check_sizes(*args) ? workspace_bytes(*args) : -1;
}

extern "C" const char* fagen_bwd_fp16_d128_causal_m64n128_varlen_message(int status) {
  using namespace fagen_bwd_fp16_d128_causal_m64n128_varlen_host;
  constexpr int kNoKernel = 100;  // of who chooses among kernels
  return status >= 0 && status <= kLaunchFailed ? kMessages[status]
         : status == kNoKernel                  ? "no kernel computes that"
                                                : "unknown status";
}

extern "C" const FagenKernelInfo* fagen_bwd_fp16_d128_causal_m64n128_varlen_info(void) {
  using namespace fagen_bwd_fp16_d128_causal_m64n128_varlen_kernel;
  static const FagenKernelInfo info = {
      sizeof(FagenKernelInfo),
      kSharedBytes,
      kThreads,
      kLaunchRegisters,
      "bwd_fp16_d128_causal_m64n128_varlen",
      "1156781cd1474a1b0ea8b2edf085a6aaeb5f8d1315b790c89043cca26a5a7112"};
  return &info;
}
// sha256 of what is above: 65f19af03c06e78cd7745c815382ce6daa56f494c77ef00c796287ca09174292
