// fwd_bf16_d192_causal_m128n112_vspace_eachmax_t8: fused attention forward for Hopper (sm_90a). Rendered by
// fagen; do not edit.
//
//   out = softmax(scale * q kᵀ) v,   lse = log(sum(exp(scale * q kᵀ)))
//
// One thread block computes 128 query rows of one head, 112 keys at a time from the last key to
// the first, with a running maximum and sum per row (online softmax, in base 2).
// One producer warp copies Q, K and V into shared memory by TMA; 2 consumer warpgroups of 64 rows
// each multiply by WGMMA. The consumers take turns at the tensor cores.
//
// Needs the CUTLASS headers and -gencode=arch=compute_90a,code=sm_90a.

#include <cuda.h>
#include <cuda_runtime.h>
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
int fagen_fwd_bf16_d192_causal_m128n112_vspace_eachmax_t8(const struct FagenForwardArgs* args,
                                                  void* stream);
const char* fagen_fwd_bf16_d192_causal_m128n112_vspace_eachmax_t8_message(int status);
const struct FagenKernelInfo* fagen_fwd_bf16_d192_causal_m128n112_vspace_eachmax_t8_info(void);

}  // extern "C"

namespace fagen_fwd_bf16_d192_causal_m128n112_vspace_eachmax_t8_kernel {

// ---- The schedule ----------------------------------------------------------------------------

using Element = __nv_bfloat16;

constexpr int kHeadDim = 192;
constexpr int kHeadDimV = 192;
constexpr int kHeadDimPadded = 192;  // in shared memory, filled up with zeros
constexpr int kHeadDimVPadded = 192;
constexpr int kBlockM = 128;
constexpr int kBlockN = 112;
constexpr int kStages = 2;  // K and V buffers
constexpr int kQStages = 1;
constexpr int kConsumers = 2;  // warpgroups of 64 query rows
constexpr int kThreads = 384;
constexpr int kLaunchRegisters = 168;
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;
constexpr int kSmemBytes = 222208;
constexpr int64_t kL2Share = 26214400;     // bytes of the L2 cache for K and V
constexpr float kRescaleThreshold = 8.0f;  // log2 units

// Tiles lie in shared memory as slabs: columns of one swizzle span, all rows of a slab together.
constexpr int kQkSlab = 64;  // columns
constexpr int kVSlab = 64;
constexpr int kVSwizzleBits = 3;
constexpr auto kQkDescriptor = cute::SM90::GMMA::LayoutType::B128;
constexpr auto kVDescriptor = cute::SM90::GMMA::LayoutType::B128;

constexpr int kWarpgroup = 128;
constexpr int kWarpgroupRows = 64;  // the M of every wgmma
constexpr int kStepK = 16;          // the K of every wgmma

constexpr int kOutputColumns = kHeadDimVPadded;
using Output =
    float[kOutputColumns / 2];  // a thread's share of a warpgroup's O, as wgmma hands it out

using Barrier = cutlass::arch::ClusterBarrier;
using TransactionBarrier = cutlass::arch::ClusterTransactionBarrier;

struct SharedStorage {
  alignas(1024) Element q[kQStages][kBlockM * kHeadDimPadded];
  alignas(1024) Element k[kStages][kBlockN * kHeadDimPadded];
  union {  // O leaves through V's space, once the last V of a tile has been read
    alignas(1024) Element v[kStages][kBlockN * kHeadDimVPadded];
    alignas(1024) Element o[kBlockM * kHeadDimVPadded];
  };
  alignas(1024) TransactionBarrier q_full[kQStages][kConsumers];
  TransactionBarrier k_full[kStages];
  TransactionBarrier v_full[kStages];
  Barrier q_empty[kQStages][kConsumers];
  Barrier k_empty[kStages];
  Barrier v_empty[kStages];
  Barrier o_empty;
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

struct Params {
  CUtensorMap q, k, v, out;
  float* lse;
  int64_t lse_stride_batch, lse_stride_head;
  Divisor heads, heads_per_kv_head;
  int seqlen_q, seqlen_k;
  int m_blocks;          // tiles of one head
  int slots;             // places for tiles, over all heads and batches
  bool some_see_no_key;  // tiles, that is
  int sections;
  Divisor section_slots;
  Divisor section_heads;  // heads, of whatever batch, whose K and V share the L2 cache
  Divisor last_section_heads;
  float scale_log2;  // scale * log2(e)
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

// S (64 x kBlockN) = or += Q (64 x 16) Kᵀ (16 x kBlockN), both from shared memory.
template <bool accumulate>
__device__ __forceinline__ void wgmma_qk(float (&s)[kBlockN / 2], Descriptor q, Descriptor k) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n112k16.f32.bf16.bf16 "
      "{ %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55 }, "
      "%56, %57, %58, 1, 1, 0, 0;"
      : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]), "+f"(s[4]), "+f"(s[5]), "+f"(s[6]),
        "+f"(s[7]), "+f"(s[8]), "+f"(s[9]), "+f"(s[10]), "+f"(s[11]), "+f"(s[12]), "+f"(s[13]),
        "+f"(s[14]), "+f"(s[15]), "+f"(s[16]), "+f"(s[17]), "+f"(s[18]), "+f"(s[19]), "+f"(s[20]),
        "+f"(s[21]), "+f"(s[22]), "+f"(s[23]), "+f"(s[24]), "+f"(s[25]), "+f"(s[26]), "+f"(s[27]),
        "+f"(s[28]), "+f"(s[29]), "+f"(s[30]), "+f"(s[31]), "+f"(s[32]), "+f"(s[33]), "+f"(s[34]),
        "+f"(s[35]), "+f"(s[36]), "+f"(s[37]), "+f"(s[38]), "+f"(s[39]), "+f"(s[40]), "+f"(s[41]),
        "+f"(s[42]), "+f"(s[43]), "+f"(s[44]), "+f"(s[45]), "+f"(s[46]), "+f"(s[47]), "+f"(s[48]),
        "+f"(s[49]), "+f"(s[50]), "+f"(s[51]), "+f"(s[52]), "+f"(s[53]), "+f"(s[54]), "+f"(s[55])
      : "l"(q.bits()), "l"(k.bits()), "n"(accumulate ? 1 : 0));
}

// O (64 x kOutputColumns) += P (64 x 16, from registers) V (16 x kOutputColumns).
__device__ __forceinline__ void wgmma_pv(Output& o, const uint32_t* p, Descriptor v) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 "
      "{ %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95 }, "
      "{ %96, %97, %98, %99 }, "
      "%100, 1, 1, 1, 1;"
      : "+f"(o[0]), "+f"(o[1]), "+f"(o[2]), "+f"(o[3]), "+f"(o[4]), "+f"(o[5]), "+f"(o[6]),
        "+f"(o[7]), "+f"(o[8]), "+f"(o[9]), "+f"(o[10]), "+f"(o[11]), "+f"(o[12]), "+f"(o[13]),
        "+f"(o[14]), "+f"(o[15]), "+f"(o[16]), "+f"(o[17]), "+f"(o[18]), "+f"(o[19]), "+f"(o[20]),
        "+f"(o[21]), "+f"(o[22]), "+f"(o[23]), "+f"(o[24]), "+f"(o[25]), "+f"(o[26]), "+f"(o[27]),
        "+f"(o[28]), "+f"(o[29]), "+f"(o[30]), "+f"(o[31]), "+f"(o[32]), "+f"(o[33]), "+f"(o[34]),
        "+f"(o[35]), "+f"(o[36]), "+f"(o[37]), "+f"(o[38]), "+f"(o[39]), "+f"(o[40]), "+f"(o[41]),
        "+f"(o[42]), "+f"(o[43]), "+f"(o[44]), "+f"(o[45]), "+f"(o[46]), "+f"(o[47]), "+f"(o[48]),
        "+f"(o[49]), "+f"(o[50]), "+f"(o[51]), "+f"(o[52]), "+f"(o[53]), "+f"(o[54]), "+f"(o[55]),
        "+f"(o[56]), "+f"(o[57]), "+f"(o[58]), "+f"(o[59]), "+f"(o[60]), "+f"(o[61]), "+f"(o[62]),
        "+f"(o[63]), "+f"(o[64]), "+f"(o[65]), "+f"(o[66]), "+f"(o[67]), "+f"(o[68]), "+f"(o[69]),
        "+f"(o[70]), "+f"(o[71]), "+f"(o[72]), "+f"(o[73]), "+f"(o[74]), "+f"(o[75]), "+f"(o[76]),
        "+f"(o[77]), "+f"(o[78]), "+f"(o[79]), "+f"(o[80]), "+f"(o[81]), "+f"(o[82]), "+f"(o[83]),
        "+f"(o[84]), "+f"(o[85]), "+f"(o[86]), "+f"(o[87]), "+f"(o[88]), "+f"(o[89]), "+f"(o[90]),
        "+f"(o[91]), "+f"(o[92]), "+f"(o[93]), "+f"(o[94]), "+f"(o[95])
      : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(v.bits()));
}

// ---- Tiles -----------------------------------------------------------------------------------

// kBlockM query rows of one head, and the keys they see.
struct Tile {
  int first_row;
  int head, kv_head, batch;
  int blocks;    // of kBlockN keys, to be visited from the last to the first; -1: no tile
  int passed;    // blocks after those, in which a consumer's rows see no key
  int unmasked;  // the leading blocks in which every row sees every key
};

__device__ __forceinline__ Tile tile_at(const Params& params, int index) {
  Tile tile;
  // The longest tiles of a section go first, so that the short ones fill its end.
  const int section = params.section_slots.divide(index);
  const int rank = index - section * params.section_slots.value;
  const Divisor& heads =
      section + 1 < params.sections ? params.section_heads : params.last_section_heads;
  const int row = heads.divide(rank);
  const int m_block = params.m_blocks - 1 - row;
  const int flat_head = section * params.section_heads.value + rank - row * heads.value;
  if (m_block < 0) {
    tile.blocks = -1;  // a slot of the last round that no tile fills
    return tile;
  }
  tile.first_row = m_block * kBlockM;
  tile.batch = params.heads.divide(flat_head);
  tile.head = flat_head - tile.batch * params.heads.value;
  tile.kv_head = params.heads_per_kv_head.divide(tile.head);
  // Aligned to the bottom right: the last query sees the last key.
  const int visible = tile.first_row + params.seqlen_k - params.seqlen_q + 1;  // to the first row
  const int keys = max(0, min(params.seqlen_k, visible + kBlockM - 1));
  tile.unmasked = max(0, min(params.seqlen_k, visible)) / kBlockN;
  tile.blocks = (keys + kBlockN - 1) / kBlockN;
  return tile;
}

// The tiles of one thread block, by index.
struct Tiles {
  int index = blockIdx.x;
  int round = 0;

  // Rounds run to and fro: the block with the longest tile of one gets the shortest of the next.
  __device__ __forceinline__ void next() {
    round += 1;
    index = round * gridDim.x + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
  }

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

struct Softmax {
  float scale_log2;
  float max[2] = {-INFINITY, -INFINITY};  // of the scores before scaling
  float sum[2] = {0.f, 0.f};              // this thread's share
  float rescale[2] = {1.f, 1.f};          // what the next block's maximum makes of O

  // Brings the running maxima up to a block of scores, and the sums with them. Returns whether O
  // has to follow. may_be_empty: a row may not have seen any key yet, so that its maximum is still
  // -inf.
  template <bool may_be_empty>
  __device__ __forceinline__ bool settle(const float (&s)[kBlockN / 2]) {
    // Two chains a row: one alone would wait for its own latency.
    float chains[4] = {max[0], max[1], s[4], s[6]};
#pragma unroll
    for (int i = 0; i < kBlockN / 2; i += 2) {
      const int chain = row_of(i) + i / 4 % 2 * 2;
      chains[chain] = fmaxf(chains[chain], fmaxf(s[i], s[i + 1]));
    }
    const float top[2] = {fmaxf(chains[0], chains[2]), fmaxf(chains[1], chains[3])};
    // A slightly stale maximum is as good: the sum is taken relative to the same one. Mostly no
    // lane of a warp has more to say, and then lanes need not compare, nor anything be multiplied.
    if (__all_sync(0xffffffff, (top[0] - max[0]) * scale_log2 <= kRescaleThreshold &&
                                   (top[1] - max[1]) * scale_log2 <= kRescaleThreshold)) {
      return false;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float before = max[r];
      max[r] = quad_max(top[r]);
      if ((max[r] - before) * scale_log2 <= kRescaleThreshold) {
        max[r] = before;
      }
      rescale[r] = exp2_approx(before * scale_log2 - reference<may_be_empty>(r));
      sum[r] *= rescale[r];
    }
    return true;
  }

  // What a row's exponents are relative to.
  template <bool may_be_empty>
  __device__ __forceinline__ float reference(int r) const {
    return (may_be_empty && max[r] == -INFINITY ? 0.f : max[r]) * scale_log2;
  }

  // Turns a block of scores into probabilities relative to the running maximum; part is what is to
  // be added to the sums.
  template <bool may_be_empty>
  __device__ __forceinline__ void exponentials(const float (&s)[kBlockN / 2],
                                               float (&p)[kBlockN / 2], float (&part)[2]) const {
    const float offset[2] = {reference<may_be_empty>(0), reference<may_be_empty>(1)};
    float chains[4];
#pragma unroll
    for (int i = 0; i < kBlockN / 2; ++i) {
      p[i] = exp2_approx(fmaf(s[i], scale_log2, -offset[row_of(i)]));
      const int chain = row_of(i) + i % 2 * 2;
      chains[chain] = i < 4 ? p[i] : chains[chain] + p[i];
    }
    part[0] = chains[0] + chains[2];
    part[1] = chains[1] + chains[3];
  }

  // The same in place, and into the sums.
  template <bool may_be_empty>
  __device__ __forceinline__ void exponentials(float (&s)[kBlockN / 2]) {
    float part[2];
    exponentials<may_be_empty>(s, s, part);
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

// Byte offset of an element inside a slab, as TMA and wgmma swizzle it: bits 4… take bits 7… by
// xor.
template <int slab, int swizzle_bits>
__device__ __forceinline__ int swizzled(int row, int column) {
  const int offset = (row * slab + column) * sizeof(Element);
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

// Rounds a warp's 16 rows of an accumulator to Element and lays them down as slabs of 64 rows.
template <int columns, int slab, int swizzle_bits>
__device__ __forceinline__ void store_accumulator(Element* tile, const float* x) {
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
  uint32_t o_phase = 0;

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

  __device__ __forceinline__ void load_v(const Tile& tile, int block) {
    shared.v_empty[v.stage].wait(v.phase ^ 1);
    copy<kHeadDimVPadded, kBlockN, kVSlab>(params.v, shared.v_full[v.stage], shared.v[v.stage],
                                           block * kBlockN, tile.kv_head, tile.batch,
                                           cute::TMA::CacheHintSm90::EVICT_LAST);
    v.advance();
  }

  // Until the previous tile's O has left V's space.
  __device__ __forceinline__ void wait_for_output() {
    shared.o_empty.wait(o_phase ^ 1);
    o_phase ^= 1;
  }
};

// The producer warp's life. K runs one block ahead of V, because S is wanted before P; before a
// tile's first V, which waits for the last tile's O, it runs as far as the blocks go that a shorter
// tile passes by.
__device__ __forceinline__ void produce(const Params& params, SharedStorage& shared) {
  Loader loader{params, shared};
  Tiles tiles;
  for (int index; tiles.take(params, index);) {
    const Tile tile = tile_at(params, index);
    loader.load_k(tile, tile.blocks - 1);
    loader.load_q(tile);
    constexpr int kPassed = (kBlockM + kBlockN - 1) / kBlockN;
    int asked = tile.blocks - 1;  // the last K asked for
    for (int block = tile.blocks - 1; block >= 0; --block) {
      while (asked > max(0, block - (block == tile.blocks - 1 ? kPassed : 1))) {
        loader.load_k(tile, --asked);
      }
      if (block == tile.blocks - 1) {
        loader.wait_for_output();
      }
      loader.load_v(tile, block);
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

  // Probabilities in the second product's operand layout, which is the accumulator's own.
  using Probabilities = uint32_t[kBlockN / 4];

  __device__ __forceinline__ void keep(Probabilities& p, const float (&s)[kBlockN / 2]) {
#pragma unroll
    for (int i = 0; i < kBlockN / 4; ++i) {
      p[i] = pack(s[2 * i], s[2 * i + 1]);
    }
  }

  // Issues O += P V for the current V.
  __device__ __forceinline__ void issue_pv(Output& o, Probabilities& p) {
    const Descriptor v_rows =
        descriptor(shared.v[v.stage], kVDescriptor, kBlockN * kVSlab * sizeof(Element),
                   8 * kVSlab * sizeof(Element));
    pin(o);
    pin(p);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < kBlockN; n += kStepK) {
      wgmma_pv(o, p + n / 4, v_rows + (n * kVSlab * sizeof(Element) >> 4));
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void mask_block(float (&s)[kBlockN / 2], const Tile& tile, int block) {
    const int lane = threadIdx.x % 32;
    const int keys = params.seqlen_k - block * kBlockN - lane % 4 * 2;
    const int row =
        tile.first_row + warpgroup * kWarpgroupRows + threadIdx.x % kWarpgroup / 32 * 16 + lane / 4;
    const int diagonal = keys + row - params.seqlen_q + 1;
    const int visible[2] = {min(keys, diagonal), min(keys, diagonal + 8)};
    mask(s, visible);
  }

  // A tile as this warpgroup goes through it. Its own rows may end before those of the tile, and
  // see nothing of the last blocks; one it takes part in even so.
  __device__ __forceinline__ Tile own_tile(int index) {
    Tile tile = tile_at(params, index);
    const int end = tile.first_row + (warpgroup + 1) * kWarpgroupRows;
    const int keys = min(params.seqlen_k, end + params.seqlen_k - params.seqlen_q);
    tile.passed = max(0, tile.blocks - max(1, (keys + kBlockN - 1) / kBlockN));
    tile.blocks -= tile.passed;
    tile.unmasked = max(0, keys - kWarpgroupRows + 1) / kBlockN;
    return tile;
  }

  // Lets blocks by.
  __device__ __forceinline__ void pass_k(int blocks) {
    for (; blocks > 0; --blocks) {
      await_k();
      take_turn();  // the others take part in this one
      pass_turn();
      release_k();
    }
  }

  __device__ __forceinline__ void pass_v(int blocks) {
    for (; blocks > 0; --blocks) {
      await_v();
      release_v();
    }
  }

  // S of `block` is there: K, and after a tile's last block Q, may make room.
  __device__ __forceinline__ void finish_qk(float (&s)[kBlockN / 2], int block) {
    pin(s);
    release_k();
    release(shared.q_empty[q.stage][warpgroup], block == 0);
  }

  __device__ __forceinline__ void finish_pv(Output& o) {
    pin(o);
    release_v();
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
    const bool raised = softmax.settle<masked>(s);
    wgmma_wait<0>();
    finish_pv(o);
    pin(s);  // P's registers are free only now
    softmax.exponentials<masked>(s);
    keep(p, s);
    softmax.rescale_output(o, raised);
  }

  // The first block of a tile, with nothing beside it.
  __device__ __forceinline__ void begin(const Tile& tile, float (&s)[kBlockN / 2], Probabilities& p,
                                        Softmax& softmax) {
    await_q();
    pass_k(tile.passed);
    await_k();
    issue_qk(s);
    wgmma_wait<0>();
    finish_qk(s, tile.blocks - 1);
    pass_v(tile.passed);
    mask_block(s, tile, tile.blocks - 1);
    softmax.settle<true>(s);
    softmax.exponentials<true>(s);
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
    await_v();
    take_turn();
    issue_pv(o, p);
    pass_turn();  // the others need not wait for this Q
    q.advance();
    await_q();
    const int passed = own_tile(next).passed;
    pass_k(passed);
    await_k();
    issue_qk(s);
    wgmma_wait<1>();
    finish_pv(o);
    store(tile, o, softmax);
    forget(o, softmax);
    pass_v(passed);
    asm volatile("" : "+r"(next));  // to work the tile out only here: registers are scarce above
    tile = own_tile(next);
    wgmma_wait<0>();
    finish_qk(s, tile.blocks - 1);
    mask_block(s, tile, tile.blocks - 1);
    softmax.settle<true>(s);
    softmax.exponentials<true>(s);
    keep(p, s);
  }

  // All tiles that see a key; of the last one, O and the softmax's state are left to be stored.
  __device__ __forceinline__ void attend(Tiles& tiles, Tile& tile, Output& o, Softmax& softmax) {
    float s[kBlockN / 2];
    Probabilities p;
    begin(tile, s, p, softmax);
    for (;;) {
      int block = tile.blocks - 2;
      for (; block >= tile.unmasked; --block) {
        step<true>(tile, block, s, p, o, softmax);
      }
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

  __device__ __forceinline__ void forget(Output& o, Softmax& softmax) {
#pragma unroll
    for (int i = 0; i < kOutputColumns / 2; ++i) {
      o[i] = 0.f;
    }
    softmax = Softmax{params.scale_log2};
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
            empty ? -INFINITY
                  : (softmax.max[r] * softmax.scale_log2 + log2_approx(sum)) * 0.69314718056f;
      }
    }
#pragma unroll
    for (int i = 0; i < kHeadDimVPadded / 2; ++i) {
      o[i] *= inverse[row_of(i)];
    }

    Element* rows = shared.o + warpgroup * kWarpgroupRows * kHeadDimVPadded;
    const bool leader = threadIdx.x % kWarpgroup == 0;
    barrier_sync(kAllConsumers, kConsumers * kWarpgroup);  // nobody reads V any more
    store_accumulator<kHeadDimVPadded, kVSlab, kVSwizzleBits>(rows, o);
    cutlass::arch::fence_view_async_shared();
    barrier_sync(kStore + warpgroup, kWarpgroup);
    if (leader) {
#pragma unroll
      for (int column = 0; column < kHeadDimVPadded; column += kVSlab) {
        cute::SM90_TMA_STORE_4D::copy(&params.out, rows + column * kWarpgroupRows, column,
                                      first_row, tile.head, tile.batch);
      }
      cute::tma_store_arrive();
      cute::tma_store_wait<0>();
      shared.o_empty.arrive();
    }
  }

  __device__ __forceinline__ void run() {
    if (warpgroup == kConsumers - 1) {
      pass_turn();  // warpgroup 0 begins
    }
    Tiles tiles;
    int index = 0;
    bool left = tiles.take(params, index);
    Tile tile = own_tile(index);
    Output o = {};
    Softmax softmax{params.scale_log2};
    if (left) {
      attend(tiles, tile, o, softmax);
    }
    // The last tile's O, and those of tiles that see no key.
    Tiles rest;
    for (; left || rest.take<false>(params, index); left = false) {
      store(left ? tile : tile_at(params, index), o, softmax);
      forget(o, softmax);
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
      shared.k_full[stage].init(1);
      shared.v_full[stage].init(1);
      shared.k_empty[stage].init(kReaders * kConsumers * kWarpgroup / 32);
      shared.v_empty[stage].init(kReaders * kConsumers * kWarpgroup / 32);
    }
    shared.o_empty.init(kReaders * kConsumers);
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

}  // namespace fagen_fwd_bf16_d192_causal_m128n112_vspace_eachmax_t8_kernel

// ---- The host's side -------------------------------------------------------------------------

namespace fagen_fwd_bf16_d192_causal_m128n112_vspace_eachmax_t8_host {

using namespace fagen_fwd_bf16_d192_causal_m128n112_vspace_eachmax_t8_kernel;

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
};

bool strides_fit(const Tensor& t) {
  // TMA wants multiples of 16 bytes below 2^40. A dimension of one element is never stepped along.
  const auto fits = [](int64_t size, int64_t stride) {
    const int64_t bytes = stride * int64_t(sizeof(Element));
    return size <= 1 || (stride >= 0 && stride < (int64_t(1) << 38) && bytes % 16 == 0);
  };
  return fits(t.seqlen, t.stride_seq) && fits(t.heads, t.stride_head) &&
         fits(t.batch, t.stride_batch);
}

// Boxes of one slab: `columns` wide, `rows` high, of one head and batch.
bool describe(CUtensorMap* map, const Tensor& t, int columns, int rows,
              CUtensorMapSwizzle swizzle) {
  const auto bytes = [](int64_t size, int64_t stride) {
    return cuuint64_t(size <= 1 ? 16 : stride * int64_t(sizeof(Element)));
  };
  const cuuint64_t sizes[4] = {cuuint64_t(t.columns), cuuint64_t(t.seqlen), cuuint64_t(t.heads),
                               cuuint64_t(t.batch)};
  const cuuint64_t strides[3] = {bytes(t.seqlen, t.stride_seq), bytes(t.heads, t.stride_head),
                                 bytes(t.batch, t.stride_batch)};
  const cuuint32_t box[4] = {cuuint32_t(columns), cuuint32_t(rows), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  return encode_tiled()(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(t.data), sizes,
                        strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
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
  const Tensor out{a.out,   kHeadDimV,        a.seqlen_q,        a.heads,
                   a.batch, a.out_stride_seq, a.out_stride_head, a.out_stride_batch};
  Tensor k{a.k,     kHeadDim,       a.seqlen_k,      a.kv_heads,
           a.batch, a.k_stride_seq, a.k_stride_head, a.k_stride_batch};
  Tensor v{a.v,     kHeadDimV,      a.seqlen_k,      a.kv_heads,
           a.batch, a.v_stride_seq, a.v_stride_head, a.v_stride_batch};
  if (a.seqlen_k == 0) {
    k = q;  // never read, but a tensor map cannot be empty
    v = out;
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
  if (!describe(&params.q, q, kQkSlab, kWarpgroupRows, CU_TENSOR_MAP_SWIZZLE_128B) ||
      !describe(&params.k, k, kQkSlab, kBlockN, CU_TENSOR_MAP_SWIZZLE_128B) ||
      !describe(&params.v, v, kVSlab, kBlockN, CU_TENSOR_MAP_SWIZZLE_128B) ||
      !describe(&params.out, out, kVSlab, kWarpgroupRows, CU_TENSOR_MAP_SWIZZLE_128B)) {
    return kTensorMapRefused;
  }
  params.lse = a.lse;
  params.lse_stride_batch = a.lse_stride_batch;
  params.lse_stride_head = a.lse_stride_head;
  params.heads = Divisor(a.heads);
  params.heads_per_kv_head = Divisor(a.heads / a.kv_heads);
  params.seqlen_q = a.seqlen_q;
  params.seqlen_k = a.seqlen_k;
  params.m_blocks = m_blocks;
  params.some_see_no_key = a.seqlen_k == 0 || a.seqlen_q > a.seqlen_k;
  const int grid = int(std::min<int64_t>(tiles, multiprocessors));
  // Heads are taken in sections whose K and V fit their share of the L2 cache. A section has an
  // even number of rounds, nearly full, so that every block gets as many long tiles of it as short
  // ones.
  const int64_t flat_heads = int64_t(a.heads) * a.batch;
  const int64_t head_bytes = int64_t(a.seqlen_k) * (kHeadDim + kHeadDimV) * sizeof(Element);
  const int64_t cached_heads =
      kL2Share / std::max<int64_t>(1, head_bytes) * params.heads_per_kv_head.value;
  const int64_t two_rounds = 2 * grid;
  const int64_t pairs =
      std::max<int64_t>(1, std::min(cached_heads, flat_heads) * m_blocks / two_rounds);
  const int64_t section = std::clamp<int64_t>(pairs * two_rounds / m_blocks, 1, flat_heads);
  params.sections = int(ceil_div(flat_heads, section));
  params.section_heads = Divisor(int(section));
  params.last_section_heads = Divisor(int(flat_heads - (params.sections - 1) * section));
  params.section_slots = Divisor(int(ceil_div(section * m_blocks, two_rounds) * two_rounds));
  params.slots = params.sections * params.section_slots.value;
  params.scale_log2 = a.scale * 1.44269504089f;

  attention_forward<<<grid, kThreads, sizeof(SharedStorage), stream>>>(params);
  return cudaGetLastError() == cudaSuccess ? kOk : kLaunchFailed;
}

}  // namespace fagen_fwd_bf16_d192_causal_m128n112_vspace_eachmax_t8_host

extern "C" int fagen_fwd_bf16_d192_causal_m128n112_vspace_eachmax_t8(const FagenForwardArgs* args,
                                                             void* stream) {
  return fagen_fwd_bf16_d192_causal_m128n112_vspace_eachmax_t8_host::launch(
      args, static_cast<cudaStream_t>(stream));
}

extern "C" const char* fagen_fwd_bf16_d192_causal_m128n112_vspace_eachmax_t8_message(int status) {
  using namespace fagen_fwd_bf16_d192_causal_m128n112_vspace_eachmax_t8_host;
  return status >= 0 && status < kStatuses ? kMessages[status] : "unknown status";
}

extern "C" const FagenKernelInfo* fagen_fwd_bf16_d192_causal_m128n112_vspace_eachmax_t8_info(void) {
  using namespace fagen_fwd_bf16_d192_causal_m128n112_vspace_eachmax_t8_kernel;
  static const FagenKernelInfo info = {
      sizeof(FagenKernelInfo),
      sizeof(SharedStorage),
      kThreads,
      kLaunchRegisters,
      kProducerRegisters,
      kConsumerRegisters,
      "fwd_bf16_d192_causal_m128n112_vspace_eachmax_t8",
      "7541da9dcb5d01073f34e0e1910983a3d43aff5bf1e3ab3b3ea8dd70f7a9fd60"};
  return &info;
}
