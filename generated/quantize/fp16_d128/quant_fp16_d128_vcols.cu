// quant_fp16_d128_block64_vcols: quantisation to e4m3 for Hopper (sm_90a). Rendered by fagen; do
// not edit.
//
//   out = e4m3(in / descale),   descale = max |in| / 448
//
// A maximum is over 64 rows of a head, found while they are in registers: memory is read once.
// What comes out is transposed: rows of keys, in each 16 in the order 0 1 8 9 2 3 10 11 4 5 12 13 6
// 7 14 15 in which the second GEMM takes P from registers, filled up with zeros to a multiple
// of 16.
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
  void* out;              // e4m3, (batch, heads, head_dim, seqlen rounded up to 16)
  float* descale;         // (batch, heads, blocks of 64 rows): in is out * descale
  float* workspace;       // not read here
  int64_t in_stride_batch, in_stride_seq, in_stride_head;
  int64_t out_stride_batch, out_stride_head, out_stride_row;  // a row is a column of what came in
  int64_t descale_stride_batch, descale_stride_head, descale_stride_block;
  uint32_t signs[8];  // not read here
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
int fagen_quant_fp16_d128_block64_vcols(const struct FagenQuantizeArgs* args, void* stream);
const char* fagen_quant_fp16_d128_block64_vcols_message(int status);
const struct FagenQuantizeInfo* fagen_quant_fp16_d128_block64_vcols_info(void);

}  // extern "C"

namespace fagen_quant_fp16_d128_block64_vcols_kernel {

// ---- The schedule ----------------------------------------------------------------------------

using Element = __half;

constexpr int kHeadDim = 128;
constexpr int kRows = 128;  // per thread block
constexpr int kWarpRows = 16;
constexpr int kWarps = kRows / kWarpRows;
constexpr int kThreads = 256;
constexpr int kBlocks = 3;      // that a multiprocessor should hold at least
constexpr int kScaleRows = 64;  // that share a scale

// Four lanes share a row: of 32 columns, a chunk, each has 8, which are 16 bytes.
constexpr int kChunks = 4;
constexpr int kParts = 1;   // in which a warp goes through its rows
constexpr int kHeight = 2;  // rows that a lane holds at a time

constexpr float kLargest = 448.0f;  // of e4m3
constexpr float kNorm = 1.0f;       // makes the rotation orthonormal
constexpr float kLeast =
    9.094947017729282e-13f;  // what a maximum is at least: rows of zeros have a scale too

using Raw = uint32_t[kHeight][kChunks][4];
using Values = float[kHeight][kChunks][8];

struct Params {
  const Element* in;
  uint8_t* out;
  float* descale;
  int64_t in_stride_batch, in_stride_seq, in_stride_head;
  int64_t out_stride_batch, out_stride_head, out_stride_row;
  int64_t descale_stride_batch, descale_stride_head, descale_stride_block;
  int seqlen;
};

// ---- What comes in ---------------------------------------------------------------------------

__device__ __forceinline__ int lane_id() {
  return threadIdx.x % 32;
}

// The row, of a warp's 16, that is a lane's first (0) or second (1).
__device__ __forceinline__ int row_of(int which) {
  const int group = lane_id() / 4;
  return group / 2 * 2 + group % 2 * 8 +
         which;  // so that pairs of rows come in the order of P's keys
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

__device__ __forceinline__ void widen(const Raw& raw, Values& y) {
#pragma unroll
  for (int h = 0; h < kHeight; ++h) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const __half2 pair = reinterpret_cast<const __half2&>(raw[h][i][word]);
        y[h][i][2 * word] = float(pair.x);
        y[h][i][2 * word + 1] = float(pair.y);
      }
    }
  }
}

// A warp's rows; zeros past the end of the sequence.
template <bool last>
__device__ __forceinline__ void get(const Params& params, const Element* in, int first, int part,
                                    Values& y) {
  Raw raw;
  load<last>(params, in, first, part, raw);
  widen(raw, y);
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

// Transposed rows in shared memory, kRows bytes each. Where a row's groups of 16 keys lie depends
// on the row, so that neither those who write one group of 8 rows nor those who read 8 groups of
// one meet in a bank.
__device__ __forceinline__ int tile_offset(int column, int group) {
  const int turn = (column / 8 % 4 * 2 + column % 2) / (8 / kWarps);
  return column * kRows + (group ^ turn) * 16;
}

// Puts a warp's 16 keys there. A pair of keys is the 16-bit element that stmatrix transposes; lanes
// hold them in the order in which P wants them.
__device__ __forceinline__ void transpose(uint8_t* tile, const Packed (&packed)[2]) {
  const int group = threadIdx.x / 32;
  const int matrix = lane_id() / 8;
  const int row = lane_id() % 8;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    uint32_t pairs[4];
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      pairs[2 * word] = __byte_perm(packed[0][i][word], packed[1][i][word], 0x5140);
      pairs[2 * word + 1] = __byte_perm(packed[0][i][word], packed[1][i][word], 0x7362);
    }
    const int column = 32 * i + row / 2 * 8 + 2 * matrix + row % 2;
    const uint32_t at = uint32_t(__cvta_generic_to_shared(tile + tile_offset(column, group)));
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], { %1, %2, %3, %4 };" ::"r"(at),
        "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
        : "memory");
  }
}

// Writes a thread block's keys, `first` and those after it, up to the next multiple of 16.
__device__ __forceinline__ void store(const Params& params, uint8_t* out, int first,
                                      const uint8_t* tile) {
#pragma unroll
  for (int index = threadIdx.x; index < kHeadDim * kWarps; index += kThreads) {
    const int column = index / kWarps;
    const int group = index % kWarps;
    const int key = first + 16 * group;
    if (key < params.seqlen) {
      *reinterpret_cast<uint4*>(out + column * params.out_stride_row + key) =
          *reinterpret_cast<const uint4*>(tile + tile_offset(column, group));
    }
  }
}

// ---- The kernels -----------------------------------------------------------------------------

// kRows rows of a head. Heads are neighbours in memory, so they are neighbours here.
__global__ void __launch_bounds__(kThreads, kBlocks)
    quantize(const __grid_constant__ Params params) {
  const int head = blockIdx.x;
  const int block = blockIdx.y;
  const int batch = blockIdx.z;
  const int warp = threadIdx.x / 32;
  const int first = block * kRows + warp * kWarpRows;
  const Element* in = params.in + batch * params.in_stride_batch + head * params.in_stride_head;
  uint8_t* out = params.out + batch * params.out_stride_batch + head * params.out_stride_head;
  float* const descales =
      params.descale + batch * params.descale_stride_batch + head * params.descale_stride_head;

  __shared__ float tops[kWarps];
  Values y;
  get<true>(params, in, first, 0, y);
  const float own = warp_maximum(largest(y));
  if (lane_id() == 0) {
    tops[warp] = own;
  }
  __syncthreads();
  constexpr int kSharing = kScaleRows / kWarpRows;  // warps that share a scale
  const int mine = warp / kSharing;
  const float top = warp_maximum(tops[mine * kSharing + lane_id() % kSharing]);
  const float descale = fmaxf(top * kNorm, kLeast) / kLargest;
  const int index = block * (kRows / kScaleRows) + mine;
  if (lane_id() == 0 && warp % kSharing == 0 && index * kScaleRows < params.seqlen) {
    descales[index * params.descale_stride_block] = descale;
  }
  const float scale = kNorm / descale;

  alignas(128) __shared__ uint8_t tile[32 * kChunks * kRows];
  Packed packed[2];
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int h = 0; h < kHeight; ++h) {
      pack(y[h], scale, packed[part + h]);
    }
  }
  transpose(tile, packed);
  __syncthreads();
  store(params, out, block * kRows, tile);
}

}  // namespace fagen_quant_fp16_d128_block64_vcols_kernel

// ---- The host's side -------------------------------------------------------------------------

namespace fagen_quant_fp16_d128_block64_vcols_host {

using namespace fagen_quant_fp16_d128_block64_vcols_kernel;

enum Status {
  kOk,
  kWrongStruct,
  kNullPointer,
  kMisalignedPointer,
  kMisalignedStride,
  kBadSize,
  kGiven,
  kNotHopper,
  kLaunchFailed,
  kStatuses
};

constexpr const char* kMessages[kStatuses] = {
    "launched",
    "struct_bytes does not match: the caller was built for another version of FagenQuantizeArgs",
    "in, out and descale must not be null",
    "in and out must be aligned to 16 bytes",
    "the strides of in and out must be non-negative multiples of 16 bytes",
    "seqlen must lie in 0 ... 2097120, heads in 0 ... 2^30, batch in 0 ... 65535",
    "descales of blocks are found, they cannot be given",
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
  if (a.given) {
    return kGiven;
  }
  if (a.batch == 0 || a.heads == 0 || a.seqlen == 0) {
    return kOk;
  }
  if (!a.in || !a.out || !a.descale) {
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
  const int out_rows = kHeadDim;
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
  params.seqlen = a.seqlen;

  const dim3 grid(a.heads, unsigned(ceil_div(a.seqlen, kRows)), a.batch);
  quantize<<<grid, kThreads, 0, stream>>>(params);
  return cudaGetLastError() == cudaSuccess ? kOk : kLaunchFailed;
}

}  // namespace fagen_quant_fp16_d128_block64_vcols_host

extern "C" int fagen_quant_fp16_d128_block64_vcols(const FagenQuantizeArgs* args, void* stream) {
  return fagen_quant_fp16_d128_block64_vcols_host::launch(args, static_cast<cudaStream_t>(stream));
}

extern "C" const char* fagen_quant_fp16_d128_block64_vcols_message(int status) {
  using namespace fagen_quant_fp16_d128_block64_vcols_host;
  return status >= 0 && status < kStatuses ? kMessages[status] : "unknown status";
}

extern "C" const FagenQuantizeInfo* fagen_quant_fp16_d128_block64_vcols_info(void) {
  using namespace fagen_quant_fp16_d128_block64_vcols_kernel;
  static const FagenQuantizeInfo info = {
      sizeof(FagenQuantizeInfo),
      16416,
      kThreads,
      kRows,
      64,
      0,
      "quant_fp16_d128_block64_vcols",
      "a7c00bd69d289530297e730bb699b42d6a2e4b44bcc1b86808e8d827eec1e8a9"};
  return &info;
}
