// fwd_e4m3_d64_full_m256n64_s3_vrows_sblock: fused attention forward for Hopper (sm_90a).
// Rendered by fagen; do not edit.
//
//   out = softmax(scale * q kᵀ) v,   lse = log(sum(exp(scale * q kᵀ)))
//
// One thread block computes 256 query rows of one head, 64 keys at a time from the last key to
// the first, with a running maximum and sum per row (online softmax, in base 2).
// One producer warp copies Q, K and V into shared memory by TMA; 4 consumer warpgroups of 64 rows
// each multiply by WGMMA. The consumers take turns at the tensor cores.
//
// Q, K and V are in e4m3, with scales; so is P. The second product wants V transposed, which other
// warps of the producer's warpgroup do. Another one lays down the scales of blocks.
//
// Needs the CUTLASS headers and -gencode=arch=compute_90a,code=sm_90a.

#include <cuda.h>
#include <cuda_runtime.h>
#include <cuda_fp8.h>
#include <cuda_bf16.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90_desc.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

// ---- The C interface -------------------------------------------------------------------------

extern "C" {

// One call of the kernel. Strides are in elements; the last dimension of every tensor is
// contiguous.
struct FagenForwardArgs {
  uint32_t struct_bytes;  // sizeof(FagenForwardArgs), so that old callers are recognised
  uint32_t reserved;      // 0
  const void* q;          // (batch, seqlen_q, heads, head_dim)
  const void* k;          // (batch, seqlen_k, kv_heads, head_dim)
  const void* v;          // (batch, seqlen_k, kv_heads, head_dim_v)
  void* out;              // (batch, seqlen_q, heads, head_dim_v)
  float* lse;             // (batch, heads, seqlen_q), natural logarithm; null if not wanted
  int64_t q_stride_batch, q_stride_seq, q_stride_head;
  int64_t k_stride_batch, k_stride_seq, k_stride_head;
  int64_t v_stride_batch, v_stride_seq, v_stride_head;
  int64_t out_stride_batch, out_stride_seq, out_stride_head;
  int64_t lse_stride_batch, lse_stride_head;
  int32_t batch, heads, kv_heads, seqlen_q, seqlen_k;
  float scale;  // of q kᵀ before the softmax; finite and positive
  // What an element of q, k and v is to be multiplied by; all finite and above 0. Strides in
  // elements, 0 where all share one number, and 1 from block to block.
  const float* q_descale;  // (batch, heads, blocks of 64 queries)
  const float* k_descale;  // (batch, kv_heads, blocks of 64 keys)
  const float* v_descale;  // (batch, kv_heads, blocks of 64 keys)
  int64_t q_descale_stride_batch, q_descale_stride_head, q_descale_stride_block;
  int64_t k_descale_stride_batch, k_descale_stride_head, k_descale_stride_block;
  int64_t v_descale_stride_batch, v_descale_stride_head, v_descale_stride_block;
};

struct FagenKernelInfo {
  uint32_t struct_bytes;
  uint32_t shared_bytes;  // sizeof(SharedStorage)
  uint32_t threads;
  uint32_t launch_registers;
  uint32_t producer_registers;  // 0 where no warp is specialised
  uint32_t consumer_registers;  // 0 where no warp is specialised
  const char* slug;
  const char* source_hash;
};

// Enqueues the kernel on `stream` (a cudaStream_t) of the current device: 0, or a status to
// explain.
int fagen_fwd_e4m3_d64_full_m256n64_s3_vrows_sblock(const struct FagenForwardArgs* args,
                                                         void* stream);
const char* fagen_fwd_e4m3_d64_full_m256n64_s3_vrows_sblock_message(int status);
const struct FagenKernelInfo* fagen_fwd_e4m3_d64_full_m256n64_s3_vrows_sblock_info(void);

}  // extern "C"

namespace fagen_fwd_e4m3_d64_full_m256n64_s3_vrows_sblock_kernel {

// ---- The schedule ----------------------------------------------------------------------------

using Element = __nv_fp8_e4m3;
using OutElement = __nv_bfloat16;

constexpr int kHeadDim = 64;
constexpr int kHeadDimV = 64;
constexpr int kHeadDimPadded = 64;  // in shared memory, filled up with zeros
constexpr int kHeadDimVPadded = 64;
constexpr int kBlockM = 256;
constexpr int kBlockN = 64;
constexpr int kStages = 3;  // K and V buffers
constexpr int kQStages = 1;
constexpr int kConsumers = 4;  // warpgroups of 64 query rows
constexpr int kThreads = 640;
constexpr int kLaunchRegisters = 96;
constexpr int kProducerRegisters = 64;
constexpr int kConsumerRegisters = 104;
constexpr int kSmemBytes = 88064;
constexpr float kMostSum =
    448.0f;  // of a lane's probabilities in a row and block, before a maximum is sought
constexpr float kPOffset =
    4.0f;  // log2 units: P is kept this much larger, to use more of e4m3's range
constexpr int kScaleRows = 64;  // rows of Q, or keys, that share a scale
constexpr int kGroups = kBlockN / kScaleRows;

// Tiles lie in shared memory as slabs: columns of one swizzle span, all rows of a slab together.
constexpr int kQkSlab = 64;  // columns
constexpr int kVSlab = 64;   // of keys: V lies transposed
constexpr int kOSlab = 64;
constexpr int kOSwizzleBits = 3;
constexpr int kVSwizzleBits = 2;
constexpr int kVRowsSlab = 64;  // of V as it arrives
constexpr int kVRowsSwizzleBits = 2;
constexpr auto kQkDescriptor = cute::SM90::GMMA::LayoutType::B64;
constexpr auto kVDescriptor = cute::SM90::GMMA::LayoutType::B64;

constexpr int kWarpgroup = 128;
constexpr int kWarpgroupRows = 64;  // the M of every wgmma
constexpr int kStepK = 32;          // the K of every wgmma
constexpr int kTransposers = 3;     // warps: the producer's but that which loads

constexpr int kOutputColumns = kHeadDimVPadded;
using Output =
    float[kOutputColumns / 2];  // a thread's share of a warpgroup's O, as wgmma hands it out

using Barrier = cutlass::arch::ClusterBarrier;
using TransactionBarrier = cutlass::arch::ClusterTransactionBarrier;

// What turns products with the keys of a group into exponents, and P's sums back: V's scales are
// part of P.
struct alignas(16) KeyScales {
  float k, log2_v, inverse_v;
};
using BlockScales = KeyScales[kGroups];

struct SharedStorage {
  alignas(1024) Element q[kQStages][kBlockM * kHeadDimPadded];
  alignas(1024) Element k[kStages][kBlockN * kHeadDimPadded];
  alignas(
      1024) Element v_rows[kStages][kBlockN * kHeadDimVPadded];  // as they arrive; v is transposed
  alignas(1024) Element v[kStages][kBlockN * kHeadDimVPadded];
  alignas(1024) OutElement o[kBlockM * kHeadDimVPadded];
  alignas(1024) BlockScales scales[kStages];
  alignas(1024) TransactionBarrier q_full[kQStages][kConsumers];
  TransactionBarrier k_full[kStages];
  TransactionBarrier v_full[kStages];
  TransactionBarrier v_rows_full[kStages];
  Barrier v_rows_empty[kStages];
  Barrier q_empty[kQStages][kConsumers];
  Barrier k_empty[kStages];
  Barrier v_empty[kStages];
};
static_assert(sizeof(SharedStorage) <= kSmemBytes, "the layout outgrew the plan's ledger");

// n / value for 0 <= n < 2^31 by a multiplication: tiles are worked out where every thread waits
// for it. With 2^(bits - 1) < value <= 2^bits, rounding 2^(31 + bits) / value up is exact enough
// (Granlund and Montgomery, "Division by Invariant Integers using Multiplication", 1994).
struct Divisor {
  int value;
  uint32_t multiplier;  // 0: value is 1
  int shift;

  __host__ explicit Divisor(int divisor = 1) : value(divisor), multiplier(0), shift(0) {
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

// Scales in global memory: of each batch and head, one after the other for each kScaleRows rows.
struct ScaleTensor {
  const float* data;
  int64_t stride_batch, stride_head;

  __device__ __forceinline__ const float* at(int batch, int head) const {
    return data + batch * stride_batch + head * stride_head;
  }
};

struct Params {
  CUtensorMap q, k, v, out;
  float* lse;
  int64_t lse_stride_batch, lse_stride_head;
  ScaleTensor q_scale, k_scale, v_scale;
  Divisor heads, heads_per_kv_head;
  int seqlen_q, seqlen_k;
  Divisor m_blocks;      // tiles of one head
  int slots;             // places for tiles, over all heads and batches
  bool some_see_no_key;  // tiles, that is
  float scale_log2;      // scale * log2(e)
};

// ---- Tensor cores ----------------------------------------------------------------------------

// wgmma runs beside the threads that issue it. The compiler must neither move other uses of the
// operand registers into that time nor merge them, which an empty asm statement on each tells it.
template <class T, int n>
__device__ __forceinline__ void pin(T (&registers)[n]) {
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

// A matrix descriptor: where an operand begins and how its 8-row bricks follow each other. It moves
// by its low word alone: shared memory's addresses, in units of 16 bytes, never carry out of their
// 14 bits.
struct Descriptor {
  uint32_t low, high;

  __device__ __forceinline__ Descriptor operator+(uint32_t offset) const {
    return {low + offset, high};
  }
  __device__ __forceinline__ uint64_t bits() const { return uint64_t(high) << 32 | low; }
};

// leading_bytes is the step from slab to slab where the slabs lie along M or N; otherwise unused.
__device__ __forceinline__ Descriptor descriptor(const void* tile,
                                                 cute::SM90::GMMA::LayoutType layout,
                                                 uint32_t leading_bytes, uint32_t brick_bytes) {
  const uint32_t start =
      cute::cast_smem_ptr_to_uint(tile) % (1 << 18);  // in its block, of a cluster too
  return {start >> 4 | leading_bytes >> 4 << 16, brick_bytes >> 4 | static_cast<uint32_t>(layout)
                                                                        << 30};
}

// How far a descriptor moves to reach the k-th column of a tile of `rows` rows.
template <int rows, int slab>
__device__ constexpr uint32_t column_offset(int k) {
  return (k / slab * rows * slab + k % slab) * sizeof(Element) >> 4;
}

// S (64 x kBlockN) = or += Q (64 x 32) Kᵀ (32 x kBlockN), both from shared memory.
template <bool accumulate>
__device__ __forceinline__ void wgmma_qk(float (&s)[kBlockN / 2], Descriptor q, Descriptor k) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
      "{ %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31 }, "
      "%32, %33, %34, 1, 1;"
      : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]), "+f"(s[4]), "+f"(s[5]), "+f"(s[6]),
        "+f"(s[7]), "+f"(s[8]), "+f"(s[9]), "+f"(s[10]), "+f"(s[11]), "+f"(s[12]), "+f"(s[13]),
        "+f"(s[14]), "+f"(s[15]), "+f"(s[16]), "+f"(s[17]), "+f"(s[18]), "+f"(s[19]), "+f"(s[20]),
        "+f"(s[21]), "+f"(s[22]), "+f"(s[23]), "+f"(s[24]), "+f"(s[25]), "+f"(s[26]), "+f"(s[27]),
        "+f"(s[28]), "+f"(s[29]), "+f"(s[30]), "+f"(s[31])
      : "l"(q.bits()), "l"(k.bits()), "n"(accumulate ? 1 : 0));
}

// O (64 x kOutputColumns) += P (64 x 32, from registers) V (32 x kOutputColumns).
__device__ __forceinline__ void wgmma_pv(Output& o, const uint32_t* p, Descriptor v) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
      "{ %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31 }, "
      "{ %32, %33, %34, %35 }, "
      "%36, 1, 1, 1;"
      : "+f"(o[0]), "+f"(o[1]), "+f"(o[2]), "+f"(o[3]), "+f"(o[4]), "+f"(o[5]), "+f"(o[6]),
        "+f"(o[7]), "+f"(o[8]), "+f"(o[9]), "+f"(o[10]), "+f"(o[11]), "+f"(o[12]), "+f"(o[13]),
        "+f"(o[14]), "+f"(o[15]), "+f"(o[16]), "+f"(o[17]), "+f"(o[18]), "+f"(o[19]), "+f"(o[20]),
        "+f"(o[21]), "+f"(o[22]), "+f"(o[23]), "+f"(o[24]), "+f"(o[25]), "+f"(o[26]), "+f"(o[27]),
        "+f"(o[28]), "+f"(o[29]), "+f"(o[30]), "+f"(o[31])
      : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(v.bits()));
}

// ---- Tiles -----------------------------------------------------------------------------------

// kBlockM query rows of one head, and the keys they see.
struct Tile {
  int first_row;
  int head, kv_head, batch;
  int blocks;    // of kBlockN keys, to be visited from the last to the first
  int unmasked;  // the leading blocks in which every row sees every key
};

__device__ __forceinline__ Tile tile_at(const Params& params, int index) {
  Tile tile;
  const int flat_head = params.m_blocks.divide(index);  // neighbours share K and V
  const int m_block = index - flat_head * params.m_blocks.value;
  tile.first_row = m_block * kBlockM;
  tile.batch = params.heads.divide(flat_head);
  tile.head = flat_head - tile.batch * params.heads.value;
  tile.kv_head = params.heads_per_kv_head.divide(tile.head);
  const int keys = params.seqlen_k;
  tile.unmasked = keys / kBlockN;
  tile.blocks = (keys + kBlockN - 1) / kBlockN;
  return tile;
}

// The tiles of one thread block, by index.
struct Tiles {
  int index = blockIdx.x;

  __device__ __forceinline__ void next() { index += gridDim.x; }

  // The index of the next tile that sees a key, or else that sees none; false where there is none
  // left.
  template <bool sees_keys = true>
  __device__ __forceinline__ bool take(const Params& params, int& taken) {
    if (!sees_keys && !params.some_see_no_key) {
      return false;
    }
    while (index < params.slots) {
      taken = index;
      next();
      const int blocks = tile_at(params, taken).blocks;
      if (sees_keys ? blocks > 0 : blocks == 0) {
        return true;
      }
    }
    return false;
  }
};

// A place in a ring of buffers. The phase bit flips each time around.
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

// ---- Softmax ---------------------------------------------------------------------------------

// In a 64-row accumulator a thread holds two rows, eight apart: element i belongs to row i / 2 % 2
// and to column i / 4 * 8 + i % 2, counted from 2 * (lane % 4). Four lanes share a row.
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

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// Hides the keys that a row may not see. visible[r]: how many keys of this block row r sees, less
// the thread's first column.
__device__ __forceinline__ void mask(float (&s)[kBlockN / 2], const int (&visible)[2]) {
#pragma unroll
  for (int i = 0; i < kBlockN / 2; ++i) {
    if (column_of(i) >= visible[row_of(i)]) {
      s[i] = -INFINITY;
    }
  }
}

// What turns the scores of a tile's rows into exponents of 2, but for K's scales.
struct Scales {
  float scores = 0.f;  // scale * log2(e) * that of this warp's rows of Q
};

struct Softmax {
  Scales scales;
  float max[2] = {-INFINITY, -INFINITY};  // of the exponents
  float sum[2] = {0.f, 0.f};              // this thread's share, 2^kPOffset too large as P is
  float rescale[2] = {1.f, 1.f};          // what the next block's maximum makes of O

  static constexpr int kShare =
      kBlockN / 2 / kGroups;  // a thread's scores of keys that share a scale

  // Brings the running maxima up to a block of scores, and the sums with them. Returns whether O
  // has to follow. V's scales are part of the exponents. So blocks of V add up as they are, and P
  // is no smaller than without. may_be_empty: a row may not have seen any key yet, so that its
  // maximum is still -inf.
  template <bool may_be_empty>
  __device__ __forceinline__ bool settle(const float (&s)[kBlockN / 2], const BlockScales& block) {
    float top[2] = {max[0], max[1]};
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      // Two chains a row: one alone would wait for its own latency.
      const float* x = s + g * kShare;
      float chains[4] = {x[0], x[2], x[4], x[6]};
#pragma unroll
      for (int i = 0; i < kShare; i += 2) {
        const int chain = row_of(i) + i / 4 % 2 * 2;
        chains[chain] = fmaxf(chains[chain], fmaxf(x[i], x[i + 1]));
      }
      const float factor = scales.scores * block[g].k;
      top[0] = fmaxf(top[0], fmaxf(chains[0], chains[2]) * factor + block[g].log2_v);
      top[1] = fmaxf(top[1], fmaxf(chains[1], chains[3]) * factor + block[g].log2_v);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float before = max[r];
      max[r] = quad_max(top[r]);
      rescale[r] = exp2_approx(before - reference<may_be_empty>(r));
      sum[r] *= rescale[r];
    }
    return true;
  }

  // What a row's exponents are relative to.
  template <bool may_be_empty>
  __device__ __forceinline__ float reference(int r) const {
    return may_be_empty && max[r] == -INFINITY ? 0.f : max[r];
  }

  // Turns a block of scores into probabilities relative to the running maximum, times 2^kPOffset;
  // part is what is to be added to the sums. Says whether the sums are so small that no element of
  // this thread is too large for e4m3. Those of a row that has seen no key are infinite or NaN,
  // unless it may_be_empty.
  template <bool may_be_empty>
  __device__ __forceinline__ bool exponentials(const float (&s)[kBlockN / 2],
                                               float (&p)[kBlockN / 2], float (&part)[2],
                                               const BlockScales& block) const {
    const float offset[2] = {kPOffset - reference<may_be_empty>(0),
                             kPOffset - reference<may_be_empty>(1)};
    bool fits = true;
    part[0] = part[1] = 0.f;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const float* x = s + g * kShare;
      float* y = p + g * kShare;
      const KeyScales& keys = block[g];
      const float factor = scales.scores * keys.k;
      const float group_offset[2] = {offset[0] + keys.log2_v, offset[1] + keys.log2_v};
      float chains[4];
#pragma unroll
      for (int i = 0; i < kShare; ++i) {
        y[i] = exp2_approx(fmaf(x[i], factor, group_offset[row_of(i)]));
        const int chain = row_of(i) + i % 2 * 2;
        chains[chain] = i < 4 ? y[i] : chains[chain] + y[i];
      }
      for (const float sum : chains) {
        fits = fits && sum <= kMostSum;
      }
      // the sum is without V's scales
      part[0] = fmaf(chains[0] + chains[2], keys.inverse_v, part[0]);
      part[1] = fmaf(chains[1] + chains[3], keys.inverse_v, part[1]);
    }
    return fits;
  }

  // The same in place, and into the sums.
  template <bool may_be_empty>
  __device__ __forceinline__ void exponentials(float (&s)[kBlockN / 2], const BlockScales& block) {
    float part[2];
    exponentials<may_be_empty>(s, s, part, block);
    sum[0] += part[0];
    sum[1] += part[1];
  }

  __device__ __forceinline__ void rescale_output(Output& o, bool raised) const {
    if (!raised) {
      return;
    }
#pragma unroll
    for (int i = 0; i < kOutputColumns / 2; ++i) {
      o[i] *= rescale[row_of(i)];
    }
  }
};

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Four numbers of e4m3, the first in the lowest byte; what is too large becomes the largest.
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

// Byte offset of an element inside a slab, as TMA and wgmma swizzle it: bits 4… take bits 7… by
// xor.
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

// Rounds a warp's 16 rows of an accumulator to OutElement and lays them down as slabs of 64 rows.
template <int columns, int slab, int swizzle_bits>
__device__ __forceinline__ void store_accumulator(OutElement* tile, const float* x) {
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x % kWarpgroup / 32 * 16 + lane % 16;
#pragma unroll
  for (int column = 0; column < columns; column += 16) {
    char* base = reinterpret_cast<char*>(tile + column / slab * kWarpgroupRows * slab);
    const float* y = x + column / 2;
    store_matrices(base + swizzled<slab, swizzle_bits>(row, column % slab + lane / 16 * 8),
                   pack(y[0], y[1]), pack(y[2], y[3]), pack(y[4], y[5]), pack(y[6], y[7]));
  }
}

// ---- Loading ---------------------------------------------------------------------------------

// Copies tiles from global to shared memory. Used by a single thread.
struct Loader {
  const Params& params;
  SharedStorage& shared;
  RingPosition<kQStages> q;
  RingPosition<kStages> k, v;

  // One box per slab: rows past the end of a sequence and columns past the head arrive as zeros.
  template <int columns, int rows, int slab>
  __device__ __forceinline__ void copy(const CUtensorMap& map, TransactionBarrier& full,
                                       Element* tile, int row, int head, int batch,
                                       cute::TMA::CacheHintSm90 hint) {
    full.arrive_and_expect_tx(rows * columns * sizeof(Element));
#pragma unroll
    for (int column = 0; column < columns; column += slab) {
      cute::SM90_TMA_LOAD_4D::copy(&map, reinterpret_cast<uint64_t*>(&full),
                                   static_cast<uint64_t>(hint), tile + column * rows, column, row,
                                   head, batch);
    }
  }

  __device__ __forceinline__ void load_q(const Tile& tile) {
    // Each warpgroup's rows by themselves, as soon as it has done with the last ones.
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      shared.q_empty[q.stage][consumer].wait(q.phase ^ 1);
      copy<kHeadDimPadded, kWarpgroupRows, kQkSlab>(
          params.q, shared.q_full[q.stage][consumer],
          shared.q[q.stage] + consumer * kWarpgroupRows * kHeadDimPadded,
          tile.first_row + consumer * kWarpgroupRows, tile.head, tile.batch,
          cute::TMA::CacheHintSm90::EVICT_FIRST);
    }
    q.advance();
  }

  __device__ __forceinline__ void load_k(const Tile& tile, int block) {
    shared.k_empty[k.stage].wait(k.phase ^ 1);
    copy<kHeadDimPadded, kBlockN, kQkSlab>(params.k, shared.k_full[k.stage], shared.k[k.stage],
                                           block * kBlockN, tile.kv_head, tile.batch,
                                           cute::TMA::CacheHintSm90::EVICT_LAST);
    k.advance();
  }

  // For the transposers, who fill V itself.
  __device__ __forceinline__ void load_v(const Tile& tile, int block) {
    shared.v_rows_empty[v.stage].wait(v.phase ^ 1);
    copy<kHeadDimVPadded, kBlockN, kVRowsSlab>(
        params.v, shared.v_rows_full[v.stage], shared.v_rows[v.stage], block * kBlockN,
        tile.kv_head, tile.batch, cute::TMA::CacheHintSm90::EVICT_LAST);
    v.advance();
  }
};

// The producer warp's life. K runs one block ahead of V, because S is wanted before P.
__device__ __forceinline__ void produce(const Params& params, SharedStorage& shared) {
  Loader loader{params, shared};
  Tiles tiles;
  for (int index; tiles.take(params, index);) {
    const Tile tile = tile_at(params, index);
    loader.load_k(tile, tile.blocks - 1);
    loader.load_q(tile);
    for (int block = tile.blocks - 1; block >= 0; --block) {
      if (block > 0) {
        loader.load_k(tile, block - 1);
      }
      loader.load_v(tile, block);
    }
  }
}

// Lays the scales of a block beside its K. Used by a whole warp: its lanes fetch the scales of as
// many blocks at once, and each lays down its own when their turn comes.
struct ScaleLayer {
  static constexpr int kBlocks = 32 / kGroups;  // at once

  const Params& params;
  SharedStorage& shared;
  RingPosition<kStages> k;
  float k_scale, v_scale;

  // Of a tile's next block, from the last to the first.
  __device__ __forceinline__ void lay(const Tile& tile, int block) {
    const int lane = threadIdx.x % 32;
    const int first_lane = block % kBlocks * kGroups;  // of those whose scales come next
    if (block == tile.blocks - 1 || block % kBlocks == kBlocks - 1) {
      const int group = min(block * kGroups + lane - first_lane,
                            (params.seqlen_k - 1) / kScaleRows);  // there may be no more keys
      k_scale = __ldg(params.k_scale.at(tile.batch, tile.kv_head) + group);
      v_scale = __ldg(params.v_scale.at(tile.batch, tile.kv_head) + group);
    }
    shared.k_empty[k.stage].wait(k.phase ^ 1);
    if (lane >= first_lane && lane < first_lane + kGroups) {
      shared.scales[k.stage][lane - first_lane] = {k_scale, log2_approx(v_scale),
                                                   reciprocal_approx(v_scale)};
      shared.k_full[k.stage].arrive();
    }
    k.advance();
  }
};

// ---- Transposing V ---------------------------------------------------------------------------

// The wgmma of 8-bit operands reads V along its keys, and in the order in which P's registers hold
// them.

// Loads four 8x8 matrices of 16-bit elements, transposed; each lane gives the address of one row.
__device__ __forceinline__ void load_transposed(const void* address, uint32_t (&x)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { %0, %1, %2, %3 }, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(cute::cast_smem_ptr_to_uint(address))
               : "memory");
}

// By what bits 4… of a byte's place in a slab differ for its row, as TMA and wgmma swizzle it.
template <int swizzle_bits>
__device__ __forceinline__ uint32_t flip(uint32_t row_offset) {
  return (row_offset >> 3) & (((1 << swizzle_bits) - 1) << 4);
}

// Transposes a block, 32 keys by 16 columns at a time. To ldmatrix two columns are one 16-bit
// element: a lane gets keys 2q, 2q + 1, and from the next matrix 8 + 2q, 9 + 2q, of a pair of
// columns, where q is lane % 4. That is P's order already. What is left is to part the pair.
__device__ __forceinline__ void transpose(const Element* rows, Element* columns, int transposer) {
  uint32_t
      lane;  // asked for anew, lest all that follows from it take up registers from block to block
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  const uint32_t source = lane * kVRowsSlab;  // a lane gives ldmatrix the address of its key
  const uint32_t source_flip = flip<kVRowsSwizzleBits>(source);
  // stmatrix writes eight rows at once, which must lie in different banks. Even columns alone would
  // not: so the lanes of the upper four pairs part them the other way round.
  const uint32_t even = lane < 16 ? 0x6420 : 0x7531;
  const uint32_t pair = lane % 8;  // whose address, in matrix lane / 8, this lane gives to stmatrix
  const uint32_t target = (2 * pair + (lane / 8 % 2 ^ pair / 4)) * kVSlab;
  const uint32_t key = lane / 16 * 16 ^ flip<kVSwizzleBits>(target);

  for (uint32_t column = transposer * 16; column < kHeadDimVPadded; column += kTransposers * 16) {
    const Element* from = rows + column / kVRowsSlab * (kBlockN * kVRowsSlab) + source +
                          (column % kVRowsSlab ^ source_flip);
    Element* to = columns + column * kVSlab + target;
#pragma unroll
    for (int n = 0; n < kBlockN; n += 32) {
      uint32_t x[4];
      load_transposed(from + n * kVRowsSlab, x);
      store_matrices(to + n / kVSlab * (kHeadDimVPadded * kVSlab) + (n % kVSlab ^ key),
                     __byte_perm(x[0], x[1], even), __byte_perm(x[0], x[1], even ^ 0x1111),
                     __byte_perm(x[2], x[3], even), __byte_perm(x[2], x[3], even ^ 0x1111));
    }
  }
}

// The life of the warps of the producer's warpgroup that do not load.
// The last, which has no more columns than any other, lays scales as well.
__device__ __forceinline__ void transpose_all(const Params& params, SharedStorage& shared) {
  const int transposer =
      __shfl_sync(0xffffffff, threadIdx.x / 32, 0) - (kWarpgroup / 32 - kTransposers);
  RingPosition<kStages> v;
  ScaleLayer layer{params, shared};
  constexpr int kLead = 1;  // blocks that K runs ahead of V
  Tiles tiles;
  for (int index; tiles.take(params, index);) {
    const Tile tile = tile_at(params, index);
    for (int block = tile.blocks - 1 + kLead; block >= 0; --block) {
      if (block >= kLead && transposer == kTransposers - 1) {
        layer.lay(tile, block - kLead);
      }
      if (block >= tile.blocks) {
        continue;
      }
      shared.v_rows_full[v.stage].wait(v.phase);
      shared.v_empty[v.stage].wait(v.phase ^ 1);
      transpose(shared.v_rows[v.stage], shared.v[v.stage], transposer);
      // Both for what wgmma is to read and for what TMA is to overwrite; each warp speaks for
      // itself.
      cutlass::arch::fence_view_async_shared();
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        shared.v_full[v.stage].arrive();
        shared.v_rows_empty[v.stage].arrive();
      }
      v.advance();
    }
  }
}

// ---- Multiplying -----------------------------------------------------------------------------

// Hardware barriers, by number; 0 is __syncthreads.
enum NamedBarrier { kTurn = 1, kStore = kTurn + kConsumers, kAllConsumers = kStore + kConsumers };

__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// One warpgroup: 64 rows of each tile.
struct Consumer {
  const Params& params;
  SharedStorage& shared;
  const int warpgroup;  // 0 … kConsumers - 1
  RingPosition<kQStages> q;
  RingPosition<kStages> k, v;
  bool k_ready = false, v_ready = false;  // had the current K and V arrived when last asked?
  BlockScales key_scales;                 // the scales of the block whose scores come next

  // Each warp says for itself that it has read a buffer; wgmma completes per warp.
  __device__ __forceinline__ void release(Barrier& empty, bool read = true) {
    if (threadIdx.x % 32 == 0 && read) {
      empty.arrive();
    }
  }

  __device__ __forceinline__ void await_q() { shared.q_full[q.stage][warpgroup].wait(q.phase); }

  // An answer from a barrier takes a while even when it is yes. So each buffer is asked for as soon
  // as the one before it is released, and the answer arrives under the softmax.
  __device__ __forceinline__ void await_k() {
    if (!k_ready) {
      shared.k_full[k.stage].wait(k.phase);
    }
  }

  __device__ __forceinline__ void release_k() {
    release(shared.k_empty[k.stage]);
    k.advance();
    k_ready = shared.k_full[k.stage].test_wait(k.phase);
  }

  __device__ __forceinline__ void await_v() {
    if (!v_ready) {
      shared.v_full[v.stage].wait(v.phase);
    }
  }

  __device__ __forceinline__ void release_v() {
    release(shared.v_empty[v.stage]);
    v.advance();
    v_ready = shared.v_full[v.stage].test_wait(v.phase);
  }

  // The turn at the tensor cores goes round: while one warpgroup multiplies, the others do softmax.
  __device__ __forceinline__ void take_turn() { barrier_sync(kTurn + warpgroup, 2 * kWarpgroup); }
  __device__ __forceinline__ void pass_turn() {
    barrier_arrive(kTurn + (warpgroup + 1 == kConsumers ? 0 : warpgroup + 1), 2 * kWarpgroup);
  }

  // Issues S = Q Kᵀ for the current K.
  __device__ __forceinline__ void issue_qk(float (&s)[kBlockN / 2]) {
    const Descriptor q_rows =
        descriptor(shared.q[q.stage] + warpgroup * kWarpgroupRows * kHeadDimPadded, kQkDescriptor,
                   16, 8 * kQkSlab * sizeof(Element));
    const Descriptor k_rows =
        descriptor(shared.k[k.stage], kQkDescriptor, 16, 8 * kQkSlab * sizeof(Element));
    pin(s);
    wgmma_fence();
    wgmma_qk<false>(s, q_rows, k_rows);
#pragma unroll
    for (int d = kStepK; d < kHeadDimPadded; d += kStepK) {
      wgmma_qk<true>(s, q_rows + column_offset<kWarpgroupRows, kQkSlab>(d),
                     k_rows + column_offset<kBlockN, kQkSlab>(d));
    }
    wgmma_commit();
  }

  // Probabilities in the second product's operand layout. There a thread holds four neighbours in a
  // row where the accumulator gives it two and, eight columns on, two more. It keeps these: the
  // keys of P come in another order then, and V's in the same.
  using Probabilities = uint32_t[kBlockN / 8];

  __device__ __forceinline__ void keep(Probabilities& p, const float (&s)[kBlockN / 2]) {
#pragma unroll
    for (int i = 0; i < kBlockN / 8; ++i) {
      const float* x = s + i / 2 * 8 + i % 2 * 2;
      p[i] = pack(x[0], x[1], x[4], x[5]);
    }
  }

  // Issues O += P V for the current V.
  __device__ __forceinline__ void issue_pv(Output& o, Probabilities& p) {
    const Descriptor v_columns =
        descriptor(shared.v[v.stage], kVDescriptor, 16, 8 * kVSlab * sizeof(Element));
    pin(o);
    pin(p);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < kBlockN; n += kStepK) {
      wgmma_pv(o, p + n / 8, v_columns + column_offset<kHeadDimVPadded, kVSlab>(n));
    }
    wgmma_commit();
  }

  // The first row of this warp, whose 16 rows share a scale.
  __device__ __forceinline__ Scales scales_of(const Tile& tile) {
    const int row =
        tile.first_row + warpgroup * kWarpgroupRows + threadIdx.x % kWarpgroup / 32 * 16;
    const int group = min(row, params.seqlen_q - 1) / kScaleRows;
    return {params.scale_log2 * __ldg(params.q_scale.at(tile.batch, tile.head) + group)};
  }

  // The current K's scales, before it makes room for another. Earlier the next product would wait
  // for them.
  __device__ __forceinline__ void read_scales() {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      key_scales[g] = shared.scales[k.stage][g];
    }
    __syncwarp();  // one lane speaks for all
  }

  __device__ __forceinline__ void mask_block(float (&s)[kBlockN / 2], const Tile& tile, int block) {
    const int lane = threadIdx.x % 32;
    const int keys = params.seqlen_k - block * kBlockN - lane % 4 * 2;
    if (params.seqlen_k - block * kBlockN < kBlockN) {
      const int visible[2] = {keys, keys};
      mask(s, visible);
    }
  }

  // S of `block` is there: K, and after a tile's last block Q, may make room.
  __device__ __forceinline__ void finish_qk(float (&s)[kBlockN / 2], int block) {
    pin(s);
    read_scales();
    release_k();
    release(shared.q_empty[q.stage][warpgroup], block == 0);
  }

  __device__ __forceinline__ void finish_pv(Output& o) {
    pin(o);
    release_v();
  }

  // S becomes P, relative to the maximum so far. Where that lets P grow too large, which is rare, S
  // is still there, and so can the block's own maximum be found after all.
  __device__ __forceinline__ void soften(float (&s)[kBlockN / 2], Probabilities& p, Output& o,
                                         Softmax& softmax) {
    float guessed[kBlockN / 2], part[2];
    const bool fits =
        __all_sync(0xffffffff, softmax.exponentials<false>(s, guessed, part, key_scales));
    keep(p, guessed);
    if (!fits) {
      part[0] = part[1] = 0.f;  // it has gone into the sums
      softmax.settle<true>(s, key_scales);
      softmax.exponentials<true>(s, key_scales);
      keep(p, s);
    }
    softmax.sum[0] += part[0];
    softmax.sum[1] += part[1];
    softmax.rescale_output(o, !fits);
  }

  // One block, with two products in flight: this block's S and the O of the block before. The
  // softmax of S comes after both; beside it run the other warpgroups' products.
  template <bool masked>
  __device__ __forceinline__ void step(const Tile& tile, int block, float (&s)[kBlockN / 2],
                                       Probabilities& p, Output& o, Softmax& softmax) {
    await_k();
    take_turn();
    issue_qk(s);
    await_v();
    issue_pv(o, p);
    pass_turn();
    wgmma_wait<1>();
    finish_qk(s, block);
    if (masked) {
      mask_block(s, tile, block);
    }
    wgmma_wait<0>();
    finish_pv(o);
    pin(s);  // P's registers are free only now
    soften(s, p, o, softmax);
  }

  // The first block of a tile, with nothing beside it.
  __device__ __forceinline__ void begin(const Tile& tile, float (&s)[kBlockN / 2], Probabilities& p,
                                        Softmax& softmax) {
    await_q();
    await_k();
    issue_qk(s);
    wgmma_wait<0>();
    finish_qk(s, tile.blocks - 1);
    mask_block(s, tile, tile.blocks - 1);
    softmax.settle<true>(s, key_scales);
    softmax.exponentials<true>(s, key_scales);
    keep(p, s);
  }

  // The last O of a tile, with nothing beside it.
  __device__ __forceinline__ void end(Probabilities& p, Output& o) {
    await_v();
    issue_pv(o, p);
    wgmma_wait<0>();
    finish_pv(o);
  }

  // From one tile to the next: the last O of the one, then the first S of the other. The one is
  // stored while S is being computed.
  __device__ __forceinline__ void cross(Tile& tile, int next, float (&s)[kBlockN / 2],
                                        Probabilities& p, Output& o, Softmax& softmax) {
    // The next tile's scales are asked for here, where S's registers are free, and arrive in time.
    const Tile coming = tile_at(params, next);
    const Scales scales = scales_of(coming);
    await_v();
    take_turn();
    issue_pv(o, p);
    pass_turn();  // the others need not wait for this Q
    q.advance();
    await_q();
    await_k();
    issue_qk(s);
    wgmma_wait<1>();
    finish_pv(o);
    store(tile, o, softmax);
    forget(o, softmax, scales);
    asm volatile("" : "+r"(next));  // to work the tile out only here: registers are scarce above
    tile = tile_at(params, next);
    wgmma_wait<0>();
    finish_qk(s, tile.blocks - 1);
    mask_block(s, tile, tile.blocks - 1);
    softmax.settle<true>(s, key_scales);
    softmax.exponentials<true>(s, key_scales);
    keep(p, s);
  }

  // All tiles that see a key; of the last one, O and the softmax's state are left to be stored.
  __device__ __forceinline__ void attend(Tiles& tiles, Tile& tile, Output& o, Softmax& softmax) {
    float s[kBlockN / 2];
    Probabilities p;
    begin(tile, s, p, softmax);
    for (;;) {
      int block = tile.blocks - 2;
      for (; block >= 0; --block) {
        step<false>(tile, block, s, p, o, softmax);
      }
      int next;
      if (!tiles.take(params, next)) {
        break;
      }
      cross(tile, next, s, p, o, softmax);
    }
    end(p, o);
  }

  __device__ __forceinline__ void forget(Output& o, Softmax& softmax, const Scales& scales) {
#pragma unroll
    for (int i = 0; i < kOutputColumns / 2; ++i) {
      o[i] = 0.f;
    }
    softmax = Softmax{scales};
  }

  // Writes the warpgroup's 64 rows of O and LSE.
  __device__ __forceinline__ void store(const Tile& tile, Output& o, Softmax& softmax) {
    const int warp_row = threadIdx.x % kWarpgroup / 32 * 16;
    const int lane = threadIdx.x % 32;
    const int first_row = tile.first_row + warpgroup * kWarpgroupRows;
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(softmax.sum[r]);
      const bool empty = sum == 0.f;  // no key seen
      inverse[r] = empty ? 0.f : reciprocal_approx(sum);
      const int row = first_row + warp_row + lane / 4 + r * 8;
      if (params.lse && lane % 4 == 0 && row < params.seqlen_q) {
        const int64_t head =
            tile.batch * params.lse_stride_batch + tile.head * params.lse_stride_head;
        params.lse[head + row] =
            empty ? -INFINITY : (softmax.max[r] - kPOffset + log2_approx(sum)) * 0.69314718056f;
      }
    }
#pragma unroll
    for (int i = 0; i < kHeadDimVPadded / 2; ++i) {
      o[i] *= inverse[row_of(i)];
    }

    OutElement* rows = shared.o + warpgroup * kWarpgroupRows * kHeadDimVPadded;
    const bool leader = threadIdx.x % kWarpgroup == 0;
    if (leader) {
      cute::tma_store_wait<0>();  // the previous tile's O has left
    }
    barrier_sync(kStore + warpgroup, kWarpgroup);
    store_accumulator<kHeadDimVPadded, kOSlab, kOSwizzleBits>(rows, o);
    cutlass::arch::fence_view_async_shared();
    barrier_sync(kStore + warpgroup, kWarpgroup);
    if (leader) {
#pragma unroll
      for (int column = 0; column < kHeadDimVPadded; column += kOSlab) {
        cute::SM90_TMA_STORE_4D::copy(&params.out, rows + column * kWarpgroupRows, column,
                                      first_row, tile.head, tile.batch);
      }
      cute::tma_store_arrive();
    }
  }

  __device__ __forceinline__ void run() {
    if (warpgroup == kConsumers - 1) {
      pass_turn();  // warpgroup 0 begins
    }
    Tiles tiles;
    int index = 0;
    bool left = tiles.take(params, index);
    Tile tile = tile_at(params, index);
    Output o = {};
    Softmax softmax{left ? scales_of(tile) : Scales{}};
    if (left) {
      attend(tiles, tile, o, softmax);
    }
    // The last tile's O, and those of tiles that see no key.
    Tiles rest;
    for (; left || rest.take<false>(params, index); left = false) {
      store(left ? tile : tile_at(params, index), o, softmax);
      forget(o, softmax, {});
    }
    if (threadIdx.x % kWarpgroup == 0) {
      cute::tma_store_wait<0>();  // shared memory must outlive the copies out of it
    }
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
    // Who must have read a buffer before it is filled anew.
    constexpr int kReaders = 1;
    for (int stage = 0; stage < kQStages; ++stage) {
      for (int consumer = 0; consumer < kConsumers; ++consumer) {
        shared.q_full[stage][consumer].init(1);
        shared.q_empty[stage][consumer].init(kWarpgroup / 32);
      }
    }
    for (int stage = 0; stage < kStages; ++stage) {
      shared.k_full[stage].init(1 + kGroups);
      shared.v_full[stage].init(kTransposers);
      shared.k_empty[stage].init(kReaders * kConsumers * kWarpgroup / 32);
      shared.v_empty[stage].init(kReaders * kConsumers * kWarpgroup / 32);
      shared.v_rows_full[stage].init(1);
      shared.v_rows_empty[stage].init(kTransposers);
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
      transpose_all(params, shared);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    Consumer consumer{params, shared, warpgroup - 1};
    consumer.run();
  }
}

}  // namespace fagen_fwd_e4m3_d64_full_m256n64_s3_vrows_sblock_kernel

// ---- The host's side -------------------------------------------------------------------------

namespace fagen_fwd_e4m3_d64_full_m256n64_s3_vrows_sblock_host {

using namespace fagen_fwd_e4m3_d64_full_m256n64_s3_vrows_sblock_kernel;

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

enum Status {
  kOk,
  kWrongStruct,
  kNullPointer,
  kMisalignedPointer,
  kMisalignedStride,
  kBadSize,
  kBadHeads,
  kBadScale,
  kBadDescale,
  kTooManyTiles,
  kNotHopper,
  kNoDriver,
  kTensorMapRefused,
  kLaunchFailed,
  kStatuses
};

constexpr const char* kMessages[kStatuses] = {
    "launched",
    "struct_bytes does not match: the caller was built for another version of FagenForwardArgs",
    "q, k, v and out must not be null",
    "q, k, v and out must be aligned to 16 bytes",
    "the strides of q, k, v and out must be non-negative multiples of 16 bytes",
    "batch, heads and sequence lengths must lie in 0 ... 2^30",
    "heads must be a multiple of kv_heads",
    "scale must be finite and positive",
    "the descales must not be null, nor have other strides than 1 from block to block and 0 ... 2^30 elsewhere",
    "batch * heads * query tiles must be less than 2^30",
    "the current device is not a Hopper GPU (compute capability 9.0)",
    "the CUDA driver is missing, or too old for tensor maps",
    "the CUDA driver refused to describe a tensor for TMA",
    "the kernel could not be launched",
};

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's function, found at run time so that the library loads where there is no driver.
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

// Multiprocessors of the current device, with the kernel made ready for it once; 0 if it is no
// Hopper GPU.
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
      cudaFuncSetAttribute(attention_forward, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           sizeof(SharedStorage)) != cudaSuccess) {
    return 0;
  }
  if (device < kDevices) {
    known[device].store(multiprocessors, std::memory_order_release);
  }
  return multiprocessors;
}

// A tensor of (batch, seqlen, heads, columns) elements, as the caller laid it out.
struct Tensor {
  const void* data;
  int columns, seqlen, heads, batch;
  int64_t stride_seq, stride_head, stride_batch;
  int64_t element_bytes = sizeof(Element);
};

bool strides_fit(const Tensor& t) {
  // TMA wants multiples of 16 bytes below 2^40. A dimension of one element is never stepped along.
  const auto fits = [&t](int64_t size, int64_t stride) {
    const int64_t bytes = stride * t.element_bytes;
    return size <= 1 || (stride >= 0 && stride < (int64_t(1) << 38) && bytes % 16 == 0);
  };
  return fits(t.seqlen, t.stride_seq) && fits(t.heads, t.stride_head) &&
         fits(t.batch, t.stride_batch);
}

// Boxes of one slab: `columns` wide, `rows` high, of one head and batch.
bool describe(CUtensorMap* map, const Tensor& t, int columns, int rows,
              CUtensorMapSwizzle swizzle) {
  const auto bytes = [&t](int64_t size, int64_t stride) {
    return cuuint64_t(size <= 1 ? 16 : stride * t.element_bytes);
  };
  const cuuint64_t sizes[4] = {cuuint64_t(t.columns), cuuint64_t(t.seqlen), cuuint64_t(t.heads),
                               cuuint64_t(t.batch)};
  const cuuint64_t strides[3] = {bytes(t.seqlen, t.stride_seq), bytes(t.heads, t.stride_head),
                                 bytes(t.batch, t.stride_batch)};
  const cuuint32_t box[4] = {cuuint32_t(columns), cuuint32_t(rows), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUtensorMapDataType type =
      t.element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return encode_tiled()(map, type, 4, const_cast<void*>(t.data), sizes, strides, box, steps,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// False where a kernel could not reach the scales.
bool point(ScaleTensor* scales, const float* data, int64_t stride_batch, int64_t stride_head,
           int64_t stride_block, int rows) {
  *scales = {data, stride_batch, stride_head};
  const auto fits = [](int64_t stride) { return stride >= 0 && stride <= int64_t(1) << 30; };
  return fits(stride_batch) && fits(stride_head) && (data || rows == 0) &&
         (stride_block == 1 || rows <= kScaleRows);
}

Status launch(const FagenForwardArgs* args, cudaStream_t stream) {
  if (!args || args->struct_bytes != sizeof(FagenForwardArgs)) {
    return kWrongStruct;
  }
  const FagenForwardArgs& a = *args;
  for (const int size : {a.batch, a.heads, a.kv_heads, a.seqlen_q, a.seqlen_k}) {
    if (size < 0 || size > 1 << 30) {
      return kBadSize;
    }
  }
  if (!(a.scale > 0) || !std::isfinite(a.scale)) {
    return kBadScale;
  }
  if (a.batch == 0 || a.heads == 0 || a.seqlen_q == 0) {
    return kOk;
  }
  if (a.kv_heads == 0 || a.heads % a.kv_heads != 0) {
    return kBadHeads;
  }

  const Tensor q{a.q,     kHeadDim,       a.seqlen_q,      a.heads,
                 a.batch, a.q_stride_seq, a.q_stride_head, a.q_stride_batch};
  const Tensor out{a.out,
                   kHeadDimV,
                   a.seqlen_q,
                   a.heads,
                   a.batch,
                   a.out_stride_seq,
                   a.out_stride_head,
                   a.out_stride_batch,
                   sizeof(OutElement)};
  Tensor k{a.k,     kHeadDim,       a.seqlen_k,      a.kv_heads,
           a.batch, a.k_stride_seq, a.k_stride_head, a.k_stride_batch};
  Tensor v{a.v,     kHeadDimV,      a.seqlen_k,      a.kv_heads,
           a.batch, a.v_stride_seq, a.v_stride_head, a.v_stride_batch};
  if (a.seqlen_k == 0) {
    k = q;  // never read, but a tensor map cannot be empty
    v = q;
  }
  for (const Tensor& t : {q, k, v, out}) {
    if (!t.data) {
      return kNullPointer;
    }
    if (reinterpret_cast<uintptr_t>(t.data) % 16 != 0) {
      return kMisalignedPointer;
    }
    if (!strides_fit(t)) {
      return kMisalignedStride;
    }
  }

  const int m_blocks = int(ceil_div(a.seqlen_q, kBlockM));
  const int64_t tiles = int64_t(m_blocks) * a.heads * a.batch;
  if (tiles >= int64_t(1) << 30) {
    return kTooManyTiles;
  }
  const int multiprocessors = prepare_device();
  if (multiprocessors == 0) {
    return kNotHopper;
  }
  if (!encode_tiled()) {
    return kNoDriver;
  }

  Params params;
  if (!point(&params.q_scale, a.q_descale, a.q_descale_stride_batch, a.q_descale_stride_head,
             a.q_descale_stride_block, a.seqlen_q) ||
      !point(&params.k_scale, a.k_descale, a.k_descale_stride_batch, a.k_descale_stride_head,
             a.k_descale_stride_block, a.seqlen_k) ||
      !point(&params.v_scale, a.v_descale, a.v_descale_stride_batch, a.v_descale_stride_head,
             a.v_descale_stride_block, a.seqlen_k)) {
    return kBadDescale;
  }
  if (!describe(&params.q, q, kQkSlab, kWarpgroupRows, CU_TENSOR_MAP_SWIZZLE_64B) ||
      !describe(&params.k, k, kQkSlab, kBlockN, CU_TENSOR_MAP_SWIZZLE_64B) ||
      !describe(&params.v, v, kVRowsSlab, kBlockN, CU_TENSOR_MAP_SWIZZLE_64B) ||
      !describe(&params.out, out, kOSlab, kWarpgroupRows, CU_TENSOR_MAP_SWIZZLE_128B)) {
    return kTensorMapRefused;
  }
  params.lse = a.lse;
  params.lse_stride_batch = a.lse_stride_batch;
  params.lse_stride_head = a.lse_stride_head;
  params.heads = Divisor(a.heads);
  params.heads_per_kv_head = Divisor(a.heads / a.kv_heads);
  params.seqlen_q = a.seqlen_q;
  params.seqlen_k = a.seqlen_k;
  params.m_blocks = Divisor(m_blocks);
  params.some_see_no_key = a.seqlen_k == 0;
  const int grid = int(std::min<int64_t>(tiles, multiprocessors));
  params.slots = int(tiles);
  params.scale_log2 = a.scale * 1.44269504089f;

  attention_forward<<<grid, kThreads, sizeof(SharedStorage), stream>>>(params);
  return cudaGetLastError() == cudaSuccess ? kOk : kLaunchFailed;
}

}  // namespace fagen_fwd_e4m3_d64_full_m256n64_s3_vrows_sblock_host

extern "C" int fagen_fwd_e4m3_d64_full_m256n64_s3_vrows_sblock(const FagenForwardArgs* args,
                                                                    void* stream) {
  return fagen_fwd_e4m3_d64_full_m256n64_s3_vrows_sblock_host::launch(
      args, static_cast<cudaStream_t>(stream));
}

extern "C" const char* fagen_fwd_e4m3_d64_full_m256n64_s3_vrows_sblock_message(int status) {
  using namespace fagen_fwd_e4m3_d64_full_m256n64_s3_vrows_sblock_host;
  return status >= 0 && status < kStatuses ? kMessages[status] : "unknown status";
}

extern "C" const FagenKernelInfo* fagen_fwd_e4m3_d64_full_m256n64_s3_vrows_sblock_info(void) {
  using namespace fagen_fwd_e4m3_d64_full_m256n64_s3_vrows_sblock_kernel;
  static const FagenKernelInfo info = {
      sizeof(FagenKernelInfo),
      sizeof(SharedStorage),
      kThreads,
      kLaunchRegisters,
      kProducerRegisters,
      kConsumerRegisters,
      "fwd_e4m3_d64_full_m256n64_s3_vrows_sblock",
      "dbf834767c4720c3e50ded3fbe43c03091116a353829b9e99db6915175cd49d2"};
  return &info;
}
