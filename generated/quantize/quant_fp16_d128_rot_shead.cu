// quant_fp16_d128_rot_shead: quantisation to e4m3 for Hopper (sm_90a). Rendered by fagen; do not
// edit.
//
//   y = in * diag(signs) * H,   out = e4m3(y / descale),   descale = max |y| / 448
//
// H is orthonormal, a Hadamard matrix of 128 columns. The same rotation of Q and K
// leaves q kᵀ as it is, and spreads a column of large numbers over all.
//
// A maximum is over a head. Where it is not given, a kernel of its own reads the tensor to find it.
//
// Needs fagen_host.h, which lies beside it, the headers below, and
// -gencode=arch=compute_90a,code=sm_90a.

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>

namespace fagen_quant_fp16_d128_rot_shead_kernel {

// ---- The schedule ----------------------------------------------------------------------------

using Element = __half;
using Pair = __half2;

constexpr int kRows = 128;  // per thread block
constexpr int kWarpRows = 16;
constexpr int kThreads = 256;
constexpr int kSharedBytes = 32;
constexpr int kLaunchRegisters = 80;
constexpr int kBlocks = 3;  // that an SM should hold at least
constexpr int kChunks = 4;  // of 32 columns: four lanes share a row, with 8 each, 16 bytes
constexpr int kPasses = 1;  // in which a warp goes through its rows
constexpr int kHeight = 2;  // rows that a lane holds at a time

constexpr int kHadamard = 128;                 // columns that are rotated together
constexpr float kNorm = 0.08838834764831845f;  // makes the rotation orthonormal

constexpr float kLargest = 448.0f;  // of e4m3
constexpr float kLeast =
    9.094947017729282e-13f;  // what a maximum is at least: rows of zeros have a scale too
constexpr int kWarps = 8;
constexpr int kReduceThreads = 256;  // of a block that puts together what many found

using Raw = uint32_t[kHeight][kChunks][4];
using Values = float[kHeight][kChunks][8];

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
  const Element* x;
  uint8_t* values;
  float* descale;
  float* maxima;          // (batch, heads, tiles) of find_maxima
  int64_t maxima_of_one;  // that a descale is made of
  int64_t x_stride_batch, x_stride_seq, x_stride_head, values_stride_batch, values_stride_head,
      values_stride_row, descale_stride_batch;
  int64_t descale_stride_head;  // blocks are contiguous
  uint32_t signs[kChunks];
  FastDivisor heads;
  FastDivisor tiles;  // of kRows rows of a head
  int seqlen;
};

// The rows of a head that a thread block has. Heads are neighbours in memory, so they are
// neighbours in a grid.
struct Tile {
  int head, index, batch;

  __device__ __forceinline__ Tile(const Params& params, const FastDivisor& tiles, int block) {
    const int row = params.heads.divide(block);
    head = block - row * params.heads.value;
    batch = tiles.divide(row);
    index = row - batch * tiles.value;
  }
};

// ---- Rows ------------------------------------------------------------------------------------

__device__ __forceinline__ int lane_id() {
  return threadIdx.x % 32;
}

// The first of a lane's columns of a chunk.
__device__ __forceinline__ int column_of(int chunk) {
  return 32 * chunk + 8 * (lane_id() % 4);
}

// The row, of a warp's 16, that is a lane's first (0) or second (1).
__device__ __forceinline__ int row_of(int which) {
  return lane_id() / 4 + 8 * which;
}

__device__ __forceinline__ void put(const uint4& eight, uint32_t (&words)[4]) {
  words[0] = eight.x;
  words[1] = eight.y;
  words[2] = eight.z;
  words[3] = eight.w;
}

// Rows of one head, `first` and those after it. The last time that they are read the caches let
// them go.
template <bool last>
__device__ __forceinline__ void load(const Params& params, const Element* in, int first, int pass,
                                     Raw& raw) {
#pragma unroll
  for (int h = 0; h < kHeight; ++h) {
    const int row = first + row_of(pass + h);
    const Element* from = in + row * params.x_stride_seq;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      uint4 got = make_uint4(0, 0, 0, 0);
      if (row < params.seqlen) {
        const uint4* at = reinterpret_cast<const uint4*>(from + column_of(i));
        got = last ? __ldcs(at) : __ldg(at);
      }
      put(got, raw[h][i]);
    }
  }
}

// Element (k, n) of a Hadamard matrix of 16 columns.
__device__ __forceinline__ float hadamard(int k, int n) {
  return __popc(k & n) % 2 ? -1.0f : 1.0f;
}

__device__ __forceinline__ void add_and_subtract(float& a, float& b) {
  const float sum = a + b;
  b = a - b;
  a = sum;
}

// d = a b: 16 rows and 16 columns of one operand, 16 rows and 8 columns of the other.
__device__ __forceinline__ void multiply(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{ %0, %1, %2, %3 }, { %4, %5, %6, %7 }, { %8, %9 }, { %10, %10, %10, %10 };"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
}

// Negates columns, then rotates rows, but for kNorm. A Hadamard matrix acts on each bit of a
// column's number by itself, in any order. Bits 0 and 1 and those that tell lanes apart are the 16
// columns of an mma: its operand is what a lane has loaded, word for word, and what it gives a lane
// are the same columns of the same rows. The other bits are inside a lane, where it takes an
// addition and a subtraction for two values.
__device__ __forceinline__ void rotate(const Params& params, const Raw& raw, Values& y) {
  const int quad = lane_id() % 4;
  const int group = lane_id() / 4;
  const Pair pair = __floats2half2_rn(hadamard(2 * quad, group), hadamard(2 * quad + 1, group));
  const uint32_t same = reinterpret_cast<const uint32_t&>(pair);
  const uint32_t opposite = same ^ 0x80008000u;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    uint32_t signs = params.signs[i] >> (8 * quad);
    asm volatile("" : "+r"(signs));  // no mask outlives its use: registers are scarce in a loop
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // bit 2 of the column
      uint32_t a[2][2] = {};                // a lane's two rows; bit 1
#pragma unroll
      for (int word = 0; word < 2; ++word) {
        const int bit = 4 * half + 2 * word;
        const uint32_t flip = (signs << (15 - bit) & 0x8000u) | (signs << (30 - bit) & 0x80000000u);
#pragma unroll
        for (int h = 0; h < kHeight; ++h) {
          a[h][word] = raw[h][i][2 * half + word] ^ flip;
        }
      }
      float low[4], high[4];
      multiply(low, a[0][0], a[1][0], a[0][1], a[1][1], same, same);
      multiply(high, a[0][0], a[1][0], a[0][1], a[1][1], same, opposite);
#pragma unroll
      for (int h = 0; h < kHeight; ++h) {
        y[h][i][4 * half + 0] = low[2 * h + 0];
        y[h][i][4 * half + 1] = low[2 * h + 1];
        y[h][i][4 * half + 2] = high[2 * h + 0];
        y[h][i][4 * half + 3] = high[2 * h + 1];
      }
    }
  }
#pragma unroll
  for (int h = 0; h < kHeight; ++h) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        add_and_subtract(y[h][i][e], y[h][i][e + 4]);
      }
    }
#pragma unroll
    for (int step = 1; step < kHadamard / 32; step *= 2) {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (!(i & step)) {
            add_and_subtract(y[h][i][e], y[h][i + step][e]);
          }
        }
      }
    }
  }
}

__device__ __forceinline__ float largest(const Values& y) {
  float top = 0.0f;
#pragma unroll
  for (int h = 0; h < kHeight; ++h) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        top = fmaxf(top, fabsf(y[h][i][e]));
      }
    }
  }
  return top;
}

// The largest of a warp's numbers, none of which is negative: as integers they have the same order.
__device__ __forceinline__ float warp_maximum(float top) {
  return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(top)));
}

// Which rows a thread block of the last kernel has. What was read last comes first: much of it is
// still in the L2 cache.
__device__ __forceinline__ int place() {
  return gridDim.x - 1 - blockIdx.x;
}

// ---- Output ----------------------------------------------------------------------------------

// Four values in a register, the first in its lowest byte; what is too large becomes 448.
__device__ __forceinline__ uint32_t pack(float a, float b, float c, float d) {
  uint32_t packed;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(packed)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}

using Packed = uint32_t[kChunks][2];  // a lane's share of one row

__device__ __forceinline__ void pack(const float (&y)[kChunks][8], float scale, Packed& packed) {
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      const float* four = &y[i][4 * word];
      packed[i][word] = pack(four[0] * scale, four[1] * scale, four[2] * scale, four[3] * scale);
    }
  }
}

// Writes a lane's share of a row. Neighbours swap 8 bytes, so that each has 16 of one chunk or the
// other.
__device__ __forceinline__ void store(const Params& params, uint8_t* out, int row,
                                      const Packed& packed) {
  const bool odd = lane_id() % 2;
  uint8_t* to = out + row * params.values_stride_row;
#pragma unroll
  for (int i = 0; i + 1 < kChunks; i += 2) {
    uint32_t kept[2], got[2];
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      kept[word] = odd ? packed[i + 1][word] : packed[i][word];
      got[word] = __shfl_xor_sync(0xffffffffu, odd ? packed[i][word] : packed[i + 1][word], 1);
    }
    const int column = odd ? column_of(i + 1) - 8 : column_of(i);
    if (row < params.seqlen) {
      *reinterpret_cast<uint4*>(to + column) = odd ? make_uint4(got[0], got[1], kept[0], kept[1])
                                                   : make_uint4(kept[0], kept[1], got[0], got[1]);
    }
  }
  if (kChunks % 2) {  // none to swap with
    const int column = column_of(kChunks - 1);
    if (row < params.seqlen) {
      *reinterpret_cast<uint2*>(to + column) =
          make_uint2(packed[kChunks - 1][0], packed[kChunks - 1][1]);
    }
  }
}

// A warp's rows, in the values that are rounded but for a scale.
template <bool last>
__device__ __forceinline__ void get(const Params& params, const Element* in, const Tile& tile,
                                    int first, int pass, Values& y) {
  Raw raw;
  load<last>(params, in, first, pass, raw);
  rotate(params, raw, y);
}

// The largest of a thread block's numbers, for its first warp.
template <int warps>
__device__ __forceinline__ float block_maximum(float top) {
  __shared__ float tops[warps];
  top = warp_maximum(top);
  if (lane_id() == 0) {
    tops[threadIdx.x / 32] = top;
  }
  __syncthreads();
  return warp_maximum(tops[lane_id() % warps]);
}

// The maximum of kRows rows of a head.
__global__ void __launch_bounds__(kThreads, kBlocks)
    find_maxima(const __grid_constant__ Params params) {
  const Tile tile(params, params.tiles, blockIdx.x);
  const int first = tile.index * kRows + threadIdx.x / 32 * kWarpRows;
  const Element* in =
      params.x + tile.batch * params.x_stride_batch + tile.head * params.x_stride_head;
  float top = 0.0f;
#pragma unroll 1
  for (int pass = 0; pass < kPasses; ++pass) {
    Values y;
    get<false>(params, in, tile, first, pass, y);
    top = fmaxf(top, largest(y));
  }
  top = block_maximum<kWarps>(top);
  if (threadIdx.x == 0) {
    params.maxima[(int64_t(tile.batch) * params.heads.value + tile.head) * params.tiles.value +
                  tile.index] = top;
  }
}

// Descales, of some maxima each.
__global__ void __launch_bounds__(kReduceThreads)
    reduce_maxima(const __grid_constant__ Params params) {
  const int64_t count = params.maxima_of_one;
  const float* of = params.maxima + blockIdx.x * count;
  float top = 0.0f;
#pragma unroll 4
  for (int64_t index = threadIdx.x; index < count; index += kReduceThreads) {
    top = fmaxf(top, of[index]);
  }
  top = block_maximum<kReduceThreads / 32>(top);
  if (threadIdx.x == 0) {
    const int batch = params.heads.divide(blockIdx.x),
              head = blockIdx.x - batch * params.heads.value;
    params.descale[batch * params.descale_stride_batch + head * params.descale_stride_head] =
        fmaxf(top * kNorm, kLeast) / kLargest;
  }
}

// kRows rows of a head.
__global__ void __launch_bounds__(kThreads, kBlocks)
    quantize(const __grid_constant__ Params params) {
  const Tile from(params, params.tiles, place());
  const int warp = threadIdx.x / 32;
  int first = from.index * kRows + warp * kWarpRows;
  const Element* in =
      params.x + from.batch * params.x_stride_batch + from.head * params.x_stride_head;
  const float* const descales = params.descale + from.batch * params.descale_stride_batch +
                                from.head * params.descale_stride_head;
  const float scale = kNorm / *descales;
  const Tile& to = from;

  uint8_t* out =
      params.values + to.batch * params.values_stride_batch + to.head * params.values_stride_head;
#pragma unroll 1
  for (int pass = 0; pass < kPasses; ++pass) {
    Values y;
    get<true>(params, in, from, first, pass, y);
#pragma unroll
    for (int h = 0; h < kHeight; ++h) {
      Packed packed;
      pack(y[h], scale, packed);
      store(params, out, first + row_of(pass + h), packed);
    }
  }
}

}  // namespace fagen_quant_fp16_d128_rot_shead_kernel

// ---- The C interface -------------------------------------------------------------------------

#ifndef FAGEN_QUANTIZE_ARGS
#define FAGEN_QUANTIZE_ARGS 3

extern "C" {

// One call of a kernel of kind quantize: the same struct for all of them. Strides are in elements;
// a dimension without one is contiguous.
struct FagenQuantizeArgs {
  uint32_t struct_bytes;  // sizeof(FagenQuantizeArgs)
  uint32_t version;       // 3: callers built for another are recognised
  void* workspace;  // from a multiple of 16 bytes on as large as fagen_<slug>_workspace says; null
                    // where that is nothing
  int64_t workspace_bytes;  // how large it is
  const void* x;            // fp16 (batch, seqlen, heads, 128)
  const void* cos;          // null: of other kernels
  const void* sin;          // null: of other kernels
  void* values;             // e4m3 (batch, seqlen, heads, 128): x is values * descale
  void* descale;            // fp32 (batch, heads): what values are to be multiplied by
  void* mean;               // null: of other kernels
  int64_t x_stride_batch, x_stride_head, x_stride_seq;
  int64_t cos_stride_batch, cos_stride_seq;
  int64_t sin_stride_batch, sin_stride_seq;
  int64_t values_stride_batch, values_stride_head, values_stride_seq;
  int64_t descale_stride_batch, descale_stride_head;
  int64_t mean_stride_batch, mean_stride_head;
  int32_t batch, heads, seqlen;
  uint32_t descale_given;  // 1: descale is read; 0: it is found and written
  uint32_t mean_given;     // 1: mean is read; 0: it is found and written
  uint32_t
      signs[8];  // random bits of the signs by which columns are negated before rows are rotated
};

}  // extern "C"

#elif FAGEN_QUANTIZE_ARGS != 3
#error "kernels of kind quantize of two versions of fagen in one translation unit"
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
int fagen_quant_fp16_d128_rot_shead(const struct FagenQuantizeArgs* args, void* stream);
// How many bytes of workspace a call of these sizes needs; -1 where args is null, or a call of such
// sizes is refused.
int64_t fagen_quant_fp16_d128_rot_shead_workspace(const struct FagenQuantizeArgs* args);
const char* fagen_quant_fp16_d128_rot_shead_message(int status);
const struct FagenKernelInfo* fagen_quant_fp16_d128_rot_shead_info(void);

}  // extern "C"

// ---- The host's side -------------------------------------------------------------------------

#include "fagen_host.h"
#if FAGEN_HOST_H != 0xa95921b9
#error "the fagen_host.h beside this kernel is that of another version of fagen"
#endif

namespace fagen_quant_fp16_d128_rot_shead_host {

using namespace fagen_quant_fp16_d128_rot_shead_kernel;
using namespace fagen_host;
using fagen_host::ceil_div;  // of 64 bits: not what a kernel calls so

// What calls end with, by Status.
constexpr const char* kMessages[] = {
    "launched",
    "struct_bytes or version is that of another FagenQuantizeArgs",
    "a size is negative or too large",
    "sizes do not go together",
    "there are 2^30 tiles or more",
    "a number must be finite and positive",
    "a tensor is given that cannot be",
    "a tensor that is needed is null",
    "a tensor does not begin at a multiple of 16 bytes (descale: 4)",
    "a stride is negative, too large, or no multiple of 16 bytes",
    "elements of an output (values, descale) overlap: a stride is 0 or too small",
    "the workspace is null, too small, or does not begin at a multiple of 16 bytes",
    "the current device is not a Hopper GPU (compute capability 9.0)",
    "the CUDA driver is missing, or too old for tensor maps",
    "the CUDA driver refused to describe a tensor for TMA",
    "the kernel could not be launched",
};

// Whether sizes go together, and are not too large.
Status check_sizes(const FagenQuantizeArgs& a) {
  for (const int size : {a.batch, a.heads, a.seqlen}) {
    if (size < 0 || size > 1073741824) {
      return kBadSize;
    }
  }
  if (double(ceil_div(a.seqlen, 128)) * double(a.heads) * double(a.batch) >= 1 << 30) {
    return kTooMany;
  }
  return kOk;
}

// Of a call whose sizes are checked, which has fewer than 2^30 of what each record is of.
int64_t workspace_bytes([[maybe_unused]] const FagenQuantizeArgs& a) {
  return a.descale_given ? 0 : int64_t(a.batch) * a.heads * ceil_div(a.seqlen, 128) * 4;
}

Status check(const FagenQuantizeArgs& a) {
  if (a.struct_bytes != sizeof(a) || a.version != FAGEN_QUANTIZE_ARGS) {
    return kWrongStruct;
  }
  if (const Status status = check_sizes(a)) {
    return status;
  }
  for (const Status status : {
           check_tensor(a.x, 2, true, false, kMostStride, 128,
                        {{a.batch, a.x_stride_batch},
                         {a.seqlen, a.x_stride_seq},
                         {a.heads, a.x_stride_head}}),
           check_tensor(a.values, 1, true, true, kMostStride, 128,
                        {{a.batch, a.values_stride_batch},
                         {a.seqlen, a.values_stride_seq},
                         {a.heads, a.values_stride_head}}),
           check_tensor(a.descale, 4, false, !a.descale_given, 1073741824, 1,
                        {{a.batch, a.descale_stride_batch}, {a.heads, a.descale_stride_head}}),
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

Status launch(const FagenQuantizeArgs& a, cudaStream_t stream) {
  if (a.batch == 0 || a.heads == 0 || a.seqlen == 0) {
    return kOk;
  }
  if (!is_hopper()) {
    return kNotHopper;
  }

  Params params;
  params.x = static_cast<const Element*>(a.x);
  params.values = static_cast<uint8_t*>(a.values);
  params.descale = static_cast<float*>(a.descale);
  params.maxima = static_cast<float*>(a.workspace);
  params.x_stride_batch = a.x_stride_batch;
  params.x_stride_seq = a.x_stride_seq;
  params.x_stride_head = a.x_stride_head;
  params.values_stride_batch = a.values_stride_batch;
  params.values_stride_head = a.values_stride_head;
  params.values_stride_row = a.values_stride_seq;
  params.descale_stride_batch = a.descale_stride_batch;
  params.descale_stride_head = a.descale_stride_head;
  params.heads = FastDivisor(a.heads);
  params.tiles = FastDivisor(int(ceil_div(a.seqlen, kRows)));
  params.seqlen = a.seqlen;

  std::copy_n(a.signs, kChunks, params.signs);

  params.maxima_of_one = params.tiles.value;

  if (!a.descale_given) {
    find_maxima<<<dim3(int64_t(a.heads) * ceil_div(a.seqlen, 128) * a.batch, 1, 1), 256, 0,
                  stream>>>(params);
  }
  if (!a.descale_given) {
    reduce_maxima<<<dim3(int64_t(a.heads) * a.batch, 1, 1), 256, 0, stream>>>(params);
  }
  quantize<<<dim3(int64_t(a.heads) * ceil_div(a.seqlen, 128) * a.batch, 1, 1), 256, 0, stream>>>(
      params);
  return cudaGetLastError() == cudaSuccess ? kOk : kLaunchFailed;
}

}  // namespace fagen_quant_fp16_d128_rot_shead_host

extern "C" int fagen_quant_fp16_d128_rot_shead(const FagenQuantizeArgs* args, void* stream) {
  using namespace fagen_quant_fp16_d128_rot_shead_host;
  const Status status = args ? check(*args) : kNullPointer;
  return status ? status : launch(*args, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t fagen_quant_fp16_d128_rot_shead_workspace(const FagenQuantizeArgs* args) {
  using namespace fagen_quant_fp16_d128_rot_shead_host;
  return args && !check_sizes(*args) ? workspace_bytes(*args) : -1;
}

extern "C" const char* fagen_quant_fp16_d128_rot_shead_message(int status) {
  using namespace fagen_quant_fp16_d128_rot_shead_host;
  constexpr int kNoKernel = 100;  // of who chooses among kernels
  return status >= 0 && status <= kLaunchFailed ? kMessages[status]
         : status == kNoKernel                  ? "no kernel computes that"
                                                : "unknown status";
}

extern "C" const FagenKernelInfo* fagen_quant_fp16_d128_rot_shead_info(void) {
  using namespace fagen_quant_fp16_d128_rot_shead_kernel;
  static const FagenKernelInfo info = {
      sizeof(FagenKernelInfo),
      kSharedBytes,
      kThreads,
      kLaunchRegisters,
      "quant_fp16_d128_rot_shead",
      "73ef77617abeebdeacdc0fc31255fb6e7cc2f8230fb61e8859ef90d26a0dee13"};
  return &info;
}
// sha256 of what is above: ca571010f5098f4c74cc79a7ce2d1c37654d836f0e6caa93babc8caa0834ea5d
