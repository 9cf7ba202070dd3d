// comb_fp32_d128_obf16_varlen: partial outputs of several splits of the keys become one, for Hopper
// (sm_90a). Rendered by fagen; do not edit.
//
//   out = sum over splits of outs * exp(lses - lse),   lse = log of the sum over splits of
//   exp(lses)
//
// Splits are combined one after the other, in their order, by fp32 operations that are each rounded
// by themselves: the bits of out and lse depend on nothing else, and another kernel that does so
// has the same. A split without a key, whose LSE is minus infinity, changes nothing, whatever its
// output holds; a row of such splits alone is 0 with an LSE of minus infinity.
//
// Needs fagen_host.h, which lies beside it, the headers below, and
// -gencode=arch=compute_90a,code=sm_90a.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace fagen_comb_fp32_d128_obf16_varlen_kernel {

// ---- The schedule ----------------------------------------------------------------------------

constexpr int kLanes = 16;  // that share a row
constexpr int kRows = 8;    // per thread block
constexpr int kThreads = kRows * kLanes;
constexpr int kBlocks = 12;  // that an SM's registers suffice for
constexpr int kLaunchRegisters = 40;

using Element = float;
constexpr int kLoads = 2;     // of 16 bytes, that each lane makes of a split's row
constexpr int kVector = 4;    // elements in 16 bytes
constexpr int kStages = 8;    // splits whose loads are under way
constexpr int kWeighing = 8;  // neighbouring lanes that work out the weights of so many splits
constexpr int kHeld = 1;      // of them, each lane
constexpr int kSharedBytes = 32768;  // at most: fewer splits take less

using Output = __nv_bfloat16;

// Where the loads of a split arrive. Each thread reads what it has loaded itself.
using Stage = uint4[kLoads][kThreads];
static_assert(kStages * sizeof(Stage) == kSharedBytes, "the ledger of shared memory");
static_assert(kHeld * kWeighing == kStages, "each split is weighed once");

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

struct Params {
  const Element* outs;
  const float* lses;
  const int32_t* num_splits;
  const int32_t* cu_seqlens;
  Output* out;
  float* lse;
  int64_t outs_stride_split, outs_stride_seq, outs_stride_head, lses_stride_split, lses_stride_head,
      out_stride_seq, out_stride_head, lse_stride_head;
  FastDivisor heads;
  int batch;
  float sequences_per_row;  // in the mean
  int splits, rows;
};

// ---- Combining -------------------------------------------------------------------------------

// Each operation is rounded to nearest by itself. What is contracted or approximated would be other
// bits: on a CPU, or in another kernel.
__host__ __device__ __forceinline__ float times(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

__host__ __device__ __forceinline__ float plus(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

__host__ __device__ __forceinline__ uint32_t bits_of(float number) {
  uint32_t bits;
  memcpy(&bits, &number, sizeof(bits));
  return bits;
}

__host__ __device__ __forceinline__ float from_bits(uint32_t bits) {
  float number;
  memcpy(&number, &bits, sizeof(number));
  return number;
}

// exp(-|d|): 2^n times a polynomial of what is left of the exponent, |f| <= 1/2.
__host__ __device__ __forceinline__ float exp_below(float d) {
  constexpr float kTerms[] = {0.6931471824645996f,    0.24022647738456726f,
                              0.055503323674201965f,  0.00961843691766262f,
                              0.0013398875016719103f, 0.00015353360504377633f};
  constexpr int kLast = sizeof(kTerms) / sizeof(float) - 1;
  const float x = times(fabsf(d), -1.4426950216293335f);
  const float y = plus(x, 12582912.0f);  // n stands in its lowest bits
  const float f = plus(x, -plus(y, -12582912.0f));
  float p = kTerms[kLast];
#pragma unroll
  for (int i = kLast - 1; i >= 0; --i) {
    p = plus(times(p, f), kTerms[i]);
  }
  p = times(plus(times(p, f), 1.0f), from_bits((bits_of(y) + 127) << 23));
  return x < -125.0f ? 0.0f : p;
}

// ln(s) for s >= 1: of its exponent, and a polynomial of its mantissa between the roots of 1/2 and
// of 2.
__host__ __device__ __forceinline__ float log_above(float s) {
  constexpr float kTerms[] = {-0.4999998211860657f,  0.3333393335342407f,   -0.25002583861351013f,
                              0.19963476061820984f,  -0.16551794111728668f, 0.14883700013160706f,
                              -0.14426842331886292f, 0.0897943452000618f};
  constexpr int kLast = sizeof(kTerms) / sizeof(float) - 1;
  const int exponent = int(bits_of(s) - 1060439283) >> 23;
  const float t = plus(times(s, from_bits(uint32_t(127 - exponent) << 23)), -1.0f);
  float q = kTerms[kLast];
#pragma unroll
  for (int i = kLast - 1; i >= 0; --i) {
    q = plus(times(q, t), kTerms[i]);
  }
  return plus(times(float(exponent), 0.6931471824645996f), plus(t, times(times(t, t), q)));
}

// What a split changes: what is summed so far is multiplied by `old`, the split's own output by
// `own`. One of the two is 1, the other a weight below: lanes hand it on with its sign set where it
// is `old`.
__host__ __device__ __forceinline__ float weigh(float lse, float maximum) {
  const float d = plus(lse, -maximum);
  const float weight = exp_below(d);
  return lse == -INFINITY ? 0.0f : d > 0.0f ? -weight : weight;
}

__host__ __device__ __forceinline__ float old_weight(float weight) {
  return int(bits_of(weight)) < 0 ? -weight : 1.0f;
}

__host__ __device__ __forceinline__ float own_weight(float weight) {
  return int(bits_of(weight)) < 0 ? 1.0f : weight;
}

__host__ __device__ __forceinline__ float accumulate(float sum, float number, float old,
                                                     float own) {
  return plus(times(sum, old), times(number, own));
}

// ---- Rows in memory --------------------------------------------------------------------------

// Heads are neighbours in memory, so they are neighbours here; `seq` counts the rows of all
// sequences.
struct Row {
  int seq, head;
};

__device__ __forceinline__ Row row_at(const Params& params, int number) {
  const int seq = params.heads.divide(number);
  return {seq, number - seq * params.heads.value};
}

__device__ __forceinline__ const Element* outs_of(const Params& params, const Row& row,
                                                  int column) {
  return params.outs + row.seq * params.outs_stride_seq + row.head * params.outs_stride_head +
         column;
}

__device__ __forceinline__ const float* lses_of(const Params& params, const Row& row) {
  return params.lses + row.head * params.lses_stride_head + row.seq;
}

__device__ __forceinline__ Output* out_of(const Params& params, const Row& row, int column) {
  return params.out + row.seq * params.out_stride_seq + row.head * params.out_stride_head + column;
}

__device__ __forceinline__ float* lse_of(const Params& params, const Row& row) {
  return params.lse + row.head * params.lse_stride_head + row.seq;
}

// How many splits the row's sequence has; none before the first sequence and behind the last. A
// warp looks at 32 starts at a time: where its first row would be if all sequences were equally
// long, and only if it is not there, everywhere. Every warp reads these numbers, so they stay in
// the L1 cache, unlike partial outputs.
__device__ __forceinline__ int find_splits(const Params& params, int row) {
  const int lane = threadIdx.x % 32;
  const int warp_row = __shfl_sync(0xffffffffu, row, 0);
  int low = 0, high = params.batch +
                      1;  // so many sequences start at the row or before it, at least and at most
  int first = max(0, min(int(float(warp_row) * params.sequences_per_row) - 15, high - 32));
  int step = 1, started, splits;
  while (true) {
    const int probe = first + lane * step;
    const bool starts = probe < high && params.cu_seqlens[probe] <= warp_row;
    splits = step == 1 && probe < params.batch ? params.num_splits[probe] : 0;
    started = __popc(__ballot_sync(0xffffffffu, starts));
    if (started > 0) {
      low = max(low, first + (started - 1) * step + 1);
    }
    if (started < 32) {
      high = min(high, first + started * step);
    }
    if (step == 1 && low >= high) {
      break;
    }
    step = (high - low) / 32 + 1;
    first = step == 1 ? max(low - 1, 0) : low + step - 1;
  }
  splits = __shfl_sync(0xffffffffu, splits, max(started - 1, 0));
  if (started == 0) {
    splits = 0;
  }
  if (row != warp_row) {  // of the same sequence, or of one after it
    high = params.batch + 1;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (params.cu_seqlens[middle] <= row) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    splits = low > 0 && low <= params.batch ? params.num_splits[low - 1] : 0;
  }
  return max(0, min(splits, params.splits));
}

// How many splits a row has, if it is there, and at most of the rows of a warp, by all lanes of it.
__device__ __forceinline__ void count_splits(const Params& params, const Row& row, bool there,
                                             int& splits, int& most) {
  const int found = find_splits(params, row.seq);
  splits = there ? found : 0;
  most = __reduce_max_sync(0xffffffffu, splits);
}

// ---- Partial outputs -------------------------------------------------------------------------

// 16 bytes of a partial output, past the L1 cache: it is read once. Never through the read-only
// path, since the launch before this one may have written it while this one was already there.
__device__ __forceinline__ void load(uint4& slot, const Element* from) {
  const uint32_t to = uint32_t(__cvta_generic_to_shared(&slot));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Loads are waited for in groups, in the order in which these are closed.
__device__ __forceinline__ void close_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

__device__ __forceinline__ void wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 1) : "memory");
}

__device__ __forceinline__ void widen(const uint4& raw, float (&numbers)[kVector]) {
  numbers[0] = __uint_as_float(raw.x);
  numbers[1] = __uint_as_float(raw.y);
  numbers[2] = __uint_as_float(raw.z);
  numbers[3] = __uint_as_float(raw.w);
}

__device__ __forceinline__ void store(Output* to, const float (&numbers)[kVector]) {
  using Pair = __nv_bfloat162;
  uint32_t words[kVector / 2];
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) {
    const Pair pair = __floats2bfloat162_rn(numbers[2 * i], numbers[2 * i + 1]);
    words[i] = reinterpret_cast<const uint32_t&>(pair);
  }
  __stcg(reinterpret_cast<uint2*>(to), make_uint2(words[0], words[1]));
}

// ---- The kernel ------------------------------------------------------------------------------

// kRows rows. Heads are neighbours in memory, so they are neighbours here.
__global__ void __launch_bounds__(kThreads, kBlocks)
    combine(const __grid_constant__ Params params) {
  const int row = int(blockIdx.x) * kRows + int(threadIdx.x) / kLanes;
  const int lane = threadIdx.x % kLanes;
  const int column = lane * kVector;
  const bool there = row < params.rows;

  const Row own = row_at(params, row);
  const Element* outs = outs_of(params, own, column);
  const float* lses = lses_of(params, own);

  // The partial outputs may be of the launch before this one: here it has ended, and what it wrote
  // can be seen.
  asm volatile("griddepcontrol.wait;" ::: "memory");

  int splits, most;
  count_splits(params, own, there, splits, most);

  extern __shared__ __align__(16) Stage ring[];  // as many as there are splits, kStages at most
  const auto load_split = [&](int stage) {       // the next one
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      load(ring[stage][k][threadIdx.x], outs + k * kLanes * kVector);
    }
    outs += params.outs_stride_split;
  };
  const int weighed = threadIdx.x % kWeighing;  // which of its neighbours' weights a lane works out
  float lse[kHeld];
  const auto load_lses = [&](int first) {
#pragma unroll
    for (int held = 0; held < kHeld; ++held) {
      const int split = first + held * kWeighing + weighed;
      lse[held] = split < splits ? __ldcg(lses + split * params.lses_stride_split) : -INFINITY;
    }
  };

  load_lses(0);
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    if (stage < splits) {
      load_split(stage);
    }
    close_group();
  }

  float maximum = -INFINITY, sum = 0.0f, total[kLoads][kVector] = {};
#pragma unroll 1
  for (int first = 0; first < most; first += kStages) {
    // Each lane weighs kHeld splits against the largest LSE before them.
    float weights[kHeld];
#pragma unroll
    for (int held = 0; held < kHeld; ++held) {
      float largest = lse[held];  // of this lane's and those before it
#pragma unroll
      for (int step = 1; step < kWeighing; step *= 2) {
        largest = fmaxf(largest, __shfl_up_sync(0xffffffffu, largest, step, kWeighing));
      }
      const float before = __shfl_up_sync(0xffffffffu, largest, 1, kWeighing);
      weights[held] = weigh(lse[held], weighed == 0 ? maximum : fmaxf(maximum, before));
      maximum = fmaxf(maximum, __shfl_sync(0xffffffffu, largest, kWeighing - 1, kWeighing));
    }
    load_lses(first + kStages);

#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      if (first + stage >= most) {
        break;
      }
      const float weight =
          __shfl_sync(0xffffffffu, weights[stage / kWeighing], stage % kWeighing, kWeighing);
      const float old = old_weight(weight), own = own_weight(weight);
      wait_group();
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        uint4 raw = ring[stage][k][threadIdx.x];
        if (own == 0.0f) {
          raw = make_uint4(0, 0, 0, 0);  // it may hold anything
        }
        float numbers[kVector];
        widen(raw, numbers);
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          total[k][j] = accumulate(total[k][j], numbers[j], old, own);
        }
      }
      sum = plus(times(sum, old), own);
      if (first + stage + kStages < splits) {
        load_split(stage);
      }
      close_group();
    }
  }

  const float inverse = sum == 0.0f ? 0.0f : __frcp_rn(sum);
  Output* const out = out_of(params, own, column);
  float* const out_lse = lse_of(params, own);
#pragma unroll
  for (int k = 0; k < kLoads; ++k) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      total[k][j] = times(total[k][j], inverse);
    }
    if (there) {
      store(out + k * kLanes * kVector, total[k]);
    }
  }
  if (there && lane == 0) {
    *out_lse = plus(maximum, log_above(sum));
  }
}

}  // namespace fagen_comb_fp32_d128_obf16_varlen_kernel

// ---- The C interface -------------------------------------------------------------------------

#ifndef FAGEN_COMBINE_ARGS
#define FAGEN_COMBINE_ARGS 1

extern "C" {

// One call of a kernel of kind combine: the same struct for all of them. Strides are in elements; a
// dimension without one is contiguous.
struct FagenCombineArgs {
  uint32_t struct_bytes;  // sizeof(FagenCombineArgs)
  uint32_t version;       // 1: callers built for another are recognised
  void* workspace;  // from a multiple of 16 bytes on as large as fagen_<slug>_workspace says; null
                    // where that is nothing
  int64_t workspace_bytes;  // how large it is
  const void*
      outs;  // fp32 (splits, seqlen, heads, 128): partial outputs, each normalised by its own sum
  const void* lses;  // fp32 (splits, heads, seqlen): their log-sum-exps, natural logarithm; minus
                     // infinity: this split saw no key
  const void* num_splits;  // int32 (batch): of each sequence; the splits after them are not read
  const void* cu_seqlens;  // int32 (batch + 1): the row at which each sequence begins, and the end
                           // of the last
  void* out;               // bf16 (seqlen, heads, 128): zeros in a row that no split saw a key of
  void* lse;  // fp32 (heads, seqlen): log-sum-exp, natural logarithm; minus infinity in a row of
              // zeros
  int64_t outs_stride_split, outs_stride_batch, outs_stride_seq, outs_stride_head;
  int64_t lses_stride_split, lses_stride_batch, lses_stride_head;
  int64_t out_stride_batch, out_stride_seq, out_stride_head;
  int64_t lse_stride_batch, lse_stride_head;
  int32_t splits, batch, seqlen, heads;
};

}  // extern "C"

#elif FAGEN_COMBINE_ARGS != 1
#error "kernels of kind combine of two versions of fagen in one translation unit"
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
int fagen_comb_fp32_d128_obf16_varlen(const struct FagenCombineArgs* args, void* stream);
// How many bytes of workspace a call of these sizes needs; -1 where args is null, or a call of such
// sizes is refused.
int64_t fagen_comb_fp32_d128_obf16_varlen_workspace(const struct FagenCombineArgs* args);
const char* fagen_comb_fp32_d128_obf16_varlen_message(int status);
const struct FagenKernelInfo* fagen_comb_fp32_d128_obf16_varlen_info(void);

}  // extern "C"

// ---- The host's side -------------------------------------------------------------------------

#include "fagen_host.h"
#if FAGEN_HOST_H != 0xa95921b9
#error "the fagen_host.h beside this kernel is that of another version of fagen"
#endif

namespace fagen_comb_fp32_d128_obf16_varlen_host {

using namespace fagen_comb_fp32_d128_obf16_varlen_kernel;
using namespace fagen_host;
using fagen_host::ceil_div;  // of 64 bits: not what a kernel calls so

// What calls end with, by Status.
constexpr const char* kMessages[] = {
    "launched",
    "struct_bytes or version is that of another FagenCombineArgs",
    "a size is negative or too large",
    "sizes do not go together",
    "there are 2^30 rows or sequences or more",
    "a number must be finite and positive",
    "a tensor is given that cannot be",
    "a tensor that is needed is null",
    "a tensor does not begin at a multiple of 16 bytes (lses: 4, num_splits: 4, cu_seqlens: 4, lse: 4)",
    "a stride is negative, too large, or no multiple of 16 bytes",
    "elements of an output (out, lse) overlap: a stride is 0 or too small",
    "the workspace is null, too small, or does not begin at a multiple of 16 bytes",
    "the current device is not a Hopper GPU (compute capability 9.0)",
    "the CUDA driver is missing, or too old for tensor maps",
    "the CUDA driver refused to describe a tensor for TMA",
    "the kernel could not be launched",
};

// Whether sizes go together, and are not too large.
Status check_sizes(const FagenCombineArgs& a) {
  for (const int size : {a.splits, a.batch, a.seqlen, a.heads}) {
    if (size < 0 || size > 1073741824) {
      return kBadSize;
    }
  }
  if (double(a.seqlen) * double(a.heads) >= 1 << 30) {
    return kTooMany;
  }
  if (double(a.batch) >= 1 << 30) {
    return kTooMany;
  }
  return kOk;
}

// Of a call whose sizes are checked, which has fewer than 2^30 of what each record is of.
int64_t workspace_bytes(const FagenCombineArgs&) {
  return 0;
}

Status check(const FagenCombineArgs& a) {
  if (a.struct_bytes != sizeof(a) || a.version != FAGEN_COMBINE_ARGS) {
    return kWrongStruct;
  }
  if (const Status status = check_sizes(a)) {
    return status;
  }
  for (const Status status : {
           check_tensor(a.outs, 4, true, false, kMostStride, 128,
                        {{a.splits, a.outs_stride_split},
                         {a.seqlen, a.outs_stride_seq},
                         {a.heads, a.outs_stride_head}}),
           check_tensor(a.lses, 4, false, false, kMostStride, a.seqlen,
                        {{a.splits, a.lses_stride_split}, {a.heads, a.lses_stride_head}}),
           check_tensor(a.num_splits, 4, false, false, kMostStride, a.batch, {}),
           check_tensor(a.cu_seqlens, 4, false, false, kMostStride, a.batch + 1, {}),
           check_tensor(a.out, 2, true, true, kMostStride, 128,
                        {{a.seqlen, a.out_stride_seq}, {a.heads, a.out_stride_head}}),
           check_tensor(a.lse, 4, false, true, kMostStride, a.seqlen,
                        {{a.heads, a.lse_stride_head}}),
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

Status launch(const FagenCombineArgs& a, cudaStream_t stream) {
  if (a.seqlen == 0 || a.heads == 0) {
    return kOk;
  }
  if (!is_hopper()) {
    return kNotHopper;
  }

  Params params;
  params.outs = static_cast<const Element*>(a.outs);
  params.lses = static_cast<const float*>(a.lses);
  params.num_splits = static_cast<const int32_t*>(a.num_splits);
  params.cu_seqlens = static_cast<const int32_t*>(a.cu_seqlens);
  params.out = static_cast<Output*>(a.out);
  params.lse = static_cast<float*>(a.lse);
  params.outs_stride_split = a.outs_stride_split;
  params.outs_stride_seq = a.outs_stride_seq;
  params.outs_stride_head = a.outs_stride_head;
  params.lses_stride_split = a.lses_stride_split;
  params.lses_stride_head = a.lses_stride_head;
  params.out_stride_seq = a.out_stride_seq;
  params.out_stride_head = a.out_stride_head;
  params.lse_stride_head = a.lse_stride_head;
  params.heads = FastDivisor(a.heads);
  params.batch = a.batch;
  params.splits = a.splits;

  params.rows = a.seqlen * a.heads;
  params.sequences_per_row = float(a.batch) / float(a.seqlen);

  const int shared_bytes = std::min(a.splits, kStages) * sizeof(Stage);

  if (!enqueue(combine, ceil_div(int64_t(a.seqlen) * a.heads, 8), kThreads, shared_bytes, stream,
               params)) {
    return kLaunchFailed;
  }
  return kOk;
}

}  // namespace fagen_comb_fp32_d128_obf16_varlen_host

extern "C" int fagen_comb_fp32_d128_obf16_varlen(const FagenCombineArgs* args, void* stream) {
  using namespace fagen_comb_fp32_d128_obf16_varlen_host;
  const Status status = args ? check(*args) : kNullPointer;
  return status ? status : launch(*args, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t fagen_comb_fp32_d128_obf16_varlen_workspace(const FagenCombineArgs* args) {
  using namespace fagen_comb_fp32_d128_obf16_varlen_host;
  return args && !check_sizes(*args) ? workspace_bytes(*args) : -1;
}

extern "C" const char* fagen_comb_fp32_d128_obf16_varlen_message(int status) {
  using namespace fagen_comb_fp32_d128_obf16_varlen_host;
  constexpr int kNoKernel = 100;  // of who chooses among kernels
  return status >= 0 && status <= kLaunchFailed ? kMessages[status]
         : status == kNoKernel                  ? "no kernel computes that"
                                                : "unknown status";
}

extern "C" const FagenKernelInfo* fagen_comb_fp32_d128_obf16_varlen_info(void) {
  using namespace fagen_comb_fp32_d128_obf16_varlen_kernel;
  static const FagenKernelInfo info = {
      sizeof(FagenKernelInfo),
      kSharedBytes,
      kThreads,
      kLaunchRegisters,
      "comb_fp32_d128_obf16_varlen",
      "4d422dad3bc71b6aa6281babba8a2bbe2fe0de18a8cedc525029196dd0535f0c"};
  return &info;
}
// sha256 of what is above: 43ca2859cde6fe32910634b94add4478e9e4159c54948c04590073b6ca84c96f
