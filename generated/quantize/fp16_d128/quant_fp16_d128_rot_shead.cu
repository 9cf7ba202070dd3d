// quant_fp16_d128_rot_head: quantisation to e4m3 for Hopper (sm_90a). Rendered by fagen; do not
// edit.
//
//   y = in * diag(signs) * H,   out = e4m3(y / descale),   descale = max |y| / 448
//
// H is orthonormal, a Hadamard matrix of 128 columns. What rotates Q and K alike
// leaves q kᵀ as it is, and spreads a column of large numbers over all.
//
// A maximum is over a head. Where it is not given, a kernel of its own reads the tensor to find it.
//
// Needs the CUDA toolkit alone, and -gencode=arch=compute_90a,code=sm_90a.

#include <cuda_runtime.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

// ---- The C interface -------------------------------------------------------------------------

extern "C" {

// One call of the kernel. Strides are in elements; the last dimension of every tensor is
// contiguous.
struct FagenQuantizeArgs {
  uint32_t struct_bytes;  // sizeof(FagenQuantizeArgs), so that old callers are recognised
  uint32_t given;         // 1: descale is there and is used; 0: it is found and written
  const void* in;         // (batch, seqlen, heads, head_dim)
  void* out;              // e4m3, (batch, seqlen, heads, head_dim)
  float* descale;         // (batch, heads): in is out * descale
  float* workspace;  // a number for 128 rows or fewer of each head; not read where descale is given
  int64_t in_stride_batch, in_stride_seq, in_stride_head;
  int64_t out_stride_batch, out_stride_head, out_stride_row;  // a row is one of the sequence
  int64_t descale_stride_batch, descale_stride_head, descale_stride_block;
  uint32_t signs[8];  // bit c % 32 of signs[c / 32]: column c is negated before it is rotated
  int32_t batch, heads, seqlen;
  int32_t reserved;  // 0
};

struct FagenQuantizeInfo {
  uint32_t struct_bytes;
  uint32_t shared_bytes;
  uint32_t threads;
  uint32_t rows;        // per thread block
  uint32_t scale_rows;  // 0 where scales are not by block
  uint32_t workspace;   // whether there is one: batch * heads * ceil(seqlen / rows) floats
  const char* slug;
  const char* source_hash;
};

// Enqueues the kernel on `stream` (a cudaStream_t) of the current device: 0, or a status to
// explain.
int fagen_quant_fp16_d128_rot_head(const struct FagenQuantizeArgs* args, void* stream);
const char* fagen_quant_fp16_d128_rot_head_message(int status);
const struct FagenQuantizeInfo* fagen_quant_fp16_d128_rot_head_info(void);

}  // extern "C"

namespace fagen_quant_fp16_d128_rot_head_kernel {

// ---- The schedule ----------------------------------------------------------------------------

using Element = __half;

constexpr int kRows = 128;  // per thread block
constexpr int kWarpRows = 16;
constexpr int kWarps = kRows / kWarpRows;
constexpr int kThreads = 256;
constexpr int kBlocks = 3;      // that a multiprocessor should hold at least
constexpr int kSettlers = 256;  // threads that make one descale of many maxima
constexpr int kRotated = 128;   // columns that are rotated together

// Four lanes share a row: of 32 columns, a chunk, each has 8, which are 16 bytes.
constexpr int kChunks = 4;
constexpr int kParts = 1;   // in which a warp goes through its rows
constexpr int kHeight = 2;  // rows that a lane holds at a time

constexpr float kLargest = 448.0f;             // of e4m3
constexpr float kNorm = 0.08838834764831845f;  // makes the rotation orthonormal
constexpr float kLeast =
    9.094947017729282e-13f;  // what a maximum is at least: rows of zeros have a scale too

using Raw = uint32_t[kHeight][kChunks][4];
using Values = float[kHeight][kChunks][8];

struct Params {
  const Element* in;
  uint8_t* out;
  float* descale;
  float* maxima;  // (batch, heads, gridDim.y) of find_maxima
  int64_t in_stride_batch, in_stride_seq, in_stride_head;
  int64_t out_stride_batch, out_stride_head, out_stride_row;
  int64_t descale_stride_batch, descale_stride_head, descale_stride_block;
  uint32_t signs[kChunks];
  int seqlen;
};

// ---- What comes in ---------------------------------------------------------------------------

__device__ __forceinline__ int lane_id() {
  return threadIdx.x % 32;
}

// The row, of a warp's 16, that is a lane's first (0) or second (1).
__device__ __forceinline__ int row_of(int which) {
  const int group = lane_id() / 4;
  return group + 8 * which;
}

// The first of a lane's columns of a chunk.
__device__ __forceinline__ int column_of(int chunk) {
  return 32 * chunk + 8 * (lane_id() % 4);
}

// Rows of one head, `first` and those after it. The last time that they are read the caches let
// them go.
template <bool last>
__device__ __forceinline__ void load(const Params& params, const Element* in, int first, int part,
                                     Raw& raw) {
#pragma unroll
  for (int h = 0; h < kHeight; ++h) {
    const int row = first + row_of(part + h);
    const Element* from = in + row * params.in_stride_seq;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      uint4 got = make_uint4(0, 0, 0, 0);
      if (row < params.seqlen) {
        const uint4* at = reinterpret_cast<const uint4*>(from + column_of(i));
        got = last ? __ldcs(at) : __ldg(at);
      }
      raw[h][i][0] = got.x;
      raw[h][i][1] = got.y;
      raw[h][i][2] = got.z;
      raw[h][i][3] = got.w;
    }
  }
}

__device__ __forceinline__ void add_and_subtract(float& a, float& b) {
  const float sum = a + b;
  b = a - b;
  a = sum;
}

// Element (k, n) of a Hadamard matrix of 16 columns.
__device__ __forceinline__ float hadamard(int k, int n) {
  return __popc(k & n) % 2 ? -1.0f : 1.0f;
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
  const __half2 pair = __floats2half2_rn(hadamard(2 * quad, group), hadamard(2 * quad + 1, group));
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
    for (int step = 1; step < kRotated / 32; step *= 2) {
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

// A warp's rows, rotated; zeros past the end of the sequence.
template <bool last>
__device__ __forceinline__ void get(const Params& params, const Element* in, int first, int part,
                                    Values& y) {
  Raw raw;
  load<last>(params, in, first, part, raw);
  rotate(params, raw, y);
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

// ---- What goes out ---------------------------------------------------------------------------

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
  uint8_t* to = out + row * params.out_stride_row;
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

// ---- The kernels -----------------------------------------------------------------------------

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

// The first of three: the maximum of kRows rows of a head.
__global__ void __launch_bounds__(kThreads, kBlocks)
    find_maxima(const __grid_constant__ Params params) {
  const int first = int(blockIdx.y) * kRows + threadIdx.x / 32 * kWarpRows;
  const Element* in =
      params.in + blockIdx.z * params.in_stride_batch + blockIdx.x * params.in_stride_head;
  float top = 0.0f;
  for (int part = 0; part < kParts; ++part) {
    Values y;
    get<false>(params, in, first, part, y);
    top = fmaxf(top, largest(y));
  }
  top = block_maximum<kWarps>(top);
  if (threadIdx.x == 0) {
    params.maxima[(int64_t(blockIdx.z) * gridDim.x + blockIdx.x) * gridDim.y + blockIdx.y] = top;
  }
}

// The second: descales, of `count` maxima each.
__global__ void __launch_bounds__(kSettlers)
    settle(const __grid_constant__ Params params, int64_t count) {
  const float* of = params.maxima + (int64_t(blockIdx.y) * gridDim.x + blockIdx.x) * count;
  float top = 0.0f;
#pragma unroll 4
  for (int64_t index = threadIdx.x; index < count; index += kSettlers) {
    top = fmaxf(top, of[index]);
  }
  top = block_maximum<kSettlers / 32>(top);
  if (threadIdx.x == 0) {
    params.descale[blockIdx.y * params.descale_stride_batch +
                   blockIdx.x * params.descale_stride_head] = fmaxf(top * kNorm, kLeast) / kLargest;
  }
}

// The last: kRows rows of a head. Heads are neighbours in memory, so they are neighbours here. What
// find_maxima read last comes first: much of it is still in the L2 cache.
__global__ void __launch_bounds__(kThreads, kBlocks)
    quantize(const __grid_constant__ Params params) {
  const int head = gridDim.x - 1 - blockIdx.x;
  const int block = gridDim.y - 1 - blockIdx.y;
  const int batch = gridDim.z - 1 - blockIdx.z;
  const int warp = threadIdx.x / 32;
  const int first = block * kRows + warp * kWarpRows;
  const Element* in = params.in + batch * params.in_stride_batch + head * params.in_stride_head;
  uint8_t* out = params.out + batch * params.out_stride_batch + head * params.out_stride_head;
  float* const descales =
      params.descale + batch * params.descale_stride_batch + head * params.descale_stride_head;

  const float descale = *descales;
  const float scale = kNorm / descale;

#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    Values y;
    get<true>(params, in, first, part, y);
#pragma unroll
    for (int h = 0; h < kHeight; ++h) {
      Packed packed;
      pack(y[h], scale, packed);
      store(params, out, first + row_of(part + h), packed);
    }
  }
}

}  // namespace fagen_quant_fp16_d128_rot_head_kernel

// ---- The host's side -------------------------------------------------------------------------

namespace fagen_quant_fp16_d128_rot_head_host {

using namespace fagen_quant_fp16_d128_rot_head_kernel;

enum Status {
  kOk,
  kWrongStruct,
  kNullPointer,
  kMisalignedPointer,
  kMisalignedStride,
  kBadSize,
  kNotHopper,
  kLaunchFailed,
  kStatuses
};

constexpr const char* kMessages[kStatuses] = {
    "launched",
    "struct_bytes does not match: the caller was built for another version of FagenQuantizeArgs",
    "in, out and descale must not be null, nor workspace where descale is not given",
    "in and out must be aligned to 16 bytes",
    "the strides of in and out must be non-negative multiples of 16 bytes",
    "seqlen must lie in 0 ... 2097120, heads in 0 ... 2^30, batch in 0 ... 65535",
    "the current device is not a Hopper GPU (compute capability 9.0)",
    "the kernel could not be launched",
};

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

bool is_hopper() {
  int device, major, minor;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess &&
         major == 9 && minor == 0;
}

Status launch(const FagenQuantizeArgs* args, cudaStream_t stream) {
  if (!args || args->struct_bytes != sizeof(FagenQuantizeArgs)) {
    return kWrongStruct;
  }
  const FagenQuantizeArgs& a = *args;
  // a grid has 65535 blocks in two of its directions, which are of 32 rows or more in one of them
  const auto within = [](int size, int most) { return size >= 0 && size <= most; };
  if (!within(a.batch, 65535) || !within(a.heads, 1 << 30) || !within(a.seqlen, 65535 * 32)) {
    return kBadSize;
  }
  if (a.batch == 0 || a.heads == 0 || a.seqlen == 0) {
    return kOk;
  }
  if (!a.in || !a.out || !a.descale || !(a.given || a.workspace)) {
    return kNullPointer;
  }
  if (reinterpret_cast<uintptr_t>(a.in) % 16 != 0 || reinterpret_cast<uintptr_t>(a.out) % 16 != 0) {
    return kMisalignedPointer;
  }
  // A dimension of one element is never stepped along.
  const auto fits = [](int size, int64_t stride, int64_t bytes) {
    return size <= 1 || (stride >= 0 && stride * bytes % 16 == 0);
  };
  const int64_t wide = sizeof(Element);
  const int out_rows = a.seqlen;
  if (!fits(a.batch, a.in_stride_batch, wide) || !fits(a.heads, a.in_stride_head, wide) ||
      !fits(a.seqlen, a.in_stride_seq, wide) || !fits(a.batch, a.out_stride_batch, 1) ||
      !fits(a.heads, a.out_stride_head, 1) || !fits(out_rows, a.out_stride_row, 1)) {
    return kMisalignedStride;
  }
  if (!is_hopper()) {
    return kNotHopper;
  }

  Params params;
  params.in = static_cast<const Element*>(a.in);
  params.out = static_cast<uint8_t*>(a.out);
  params.descale = a.descale;
  params.in_stride_batch = a.in_stride_batch;
  params.in_stride_seq = a.in_stride_seq;
  params.in_stride_head = a.in_stride_head;
  params.out_stride_batch = a.out_stride_batch;
  params.out_stride_head = a.out_stride_head;
  params.out_stride_row = a.out_stride_row;
  params.descale_stride_batch = a.descale_stride_batch;
  params.descale_stride_head = a.descale_stride_head;
  params.descale_stride_block = a.descale_stride_block;
  std::copy_n(a.signs, kChunks, params.signs);
  params.seqlen = a.seqlen;

  const dim3 grid(a.heads, unsigned(ceil_div(a.seqlen, kRows)), a.batch);
  if (!a.given) {
    params.maxima = a.workspace;
    find_maxima<<<grid, kThreads, 0, stream>>>(params);
    settle<<<dim3(a.heads, a.batch), kSettlers, 0, stream>>>(params, grid.y);
  }
  quantize<<<grid, kThreads, 0, stream>>>(params);
  return cudaGetLastError() == cudaSuccess ? kOk : kLaunchFailed;
}

}  // namespace fagen_quant_fp16_d128_rot_head_host

extern "C" int fagen_quant_fp16_d128_rot_head(const FagenQuantizeArgs* args, void* stream) {
  return fagen_quant_fp16_d128_rot_head_host::launch(args, static_cast<cudaStream_t>(stream));
}

extern "C" const char* fagen_quant_fp16_d128_rot_head_message(int status) {
  using namespace fagen_quant_fp16_d128_rot_head_host;
  return status >= 0 && status < kStatuses ? kMessages[status] : "unknown status";
}

extern "C" const FagenQuantizeInfo* fagen_quant_fp16_d128_rot_head_info(void) {
  using namespace fagen_quant_fp16_d128_rot_head_kernel;
  static const FagenQuantizeInfo info = {
      sizeof(FagenQuantizeInfo),
      32,
      kThreads,
      kRows,
      0,
      1,
      "quant_fp16_d128_rot_head",
      "3d00dd3fd72d501584ca366fa3439a4ef8a90ce881b6b0570ea553607fa8cd3c"};
  return &info;
}
