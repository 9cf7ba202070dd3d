// quant_fp16_d128_center_scol_vcols: quantisation to e4m3 for Hopper (sm_90a). Rendered by fagen;
// do not edit.
//
//   out = e4m3(in / descale),   descale = max |in| / 448
//
// A maximum is over a column of a head. Where it is not given, a kernel of its own reads the tensor
// to find it. The output is transposed: rows of keys, padded with zeros to a multiple of 16, and
// each 16 in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15 in which the PV GEMM takes P from
// registers.
//
// Needs fagen_host.h, which lies beside it, the headers below, and
// -gencode=arch=compute_90a,code=sm_90a.

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>

namespace fagen_quant_fp16_d128_center_scol_vcols_kernel {

// ---- The schedule ----------------------------------------------------------------------------

using Element = __half;
using Pair = __half2;

constexpr int kRows = 128;  // per thread block
constexpr int kWarpRows = 16;
constexpr int kThreads = 256;
constexpr int kSharedBytes = 17440;
constexpr int kLaunchRegisters = 80;
constexpr int kBlocks = 3;  // that an SM should hold at least
constexpr int kChunks = 4;  // of 32 columns: four lanes share a row, with 8 each, 16 bytes
constexpr int kPasses = 1;  // in which a warp goes through its rows
constexpr int kHeight = 2;  // rows that a lane holds at a time

constexpr int kHeadDim = 128;
constexpr float kNorm = 1.0f;         // makes the rotation orthonormal
constexpr int kReduceThreads = 1024;  // of a block that puts together what many found
constexpr int kColumnThreads = 256;   // of a block that reads columns
constexpr int kColumnBlocks = 4;      // of these, that an SM should hold at least
constexpr int kColumnRows = 512;      // that such a block reads
constexpr int kColumnLanes = 16;      // threads that share a row, 8 columns each
constexpr int kColumnNumbers = 3;     // of a column: its sum; for scales its extremes too

constexpr float kLargest = 448.0f;  // of e4m3
constexpr float kLeast =
    9.094947017729282e-13f;  // what a maximum is at least: rows of zeros have a scale too

constexpr int kWarps = 8;

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
  float* numbers;  // (batch, heads, column_tiles, kColumnNumbers, kHeadDim) of find_columns
  FastDivisor column_tiles;
  float* mean;
  int64_t mean_stride_batch, mean_stride_head, x_stride_batch, x_stride_seq, x_stride_head,
      values_stride_batch, values_stride_head, values_stride_row, descale_stride_batch;
  int64_t descale_stride_head;  // blocks are contiguous
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

// The row, of a warp's 16, that is a lane's first (0) or second (1): pairs of rows come in the
// order of P's keys.
__device__ __forceinline__ int row_of(int which) {
  const int group = lane_id() / 4;
  return group / 2 * 2 + group % 2 * 8 + which;
}

__device__ __forceinline__ void put(const uint4& eight, uint32_t (&words)[4]) {
  words[0] = eight.x;
  words[1] = eight.y;
  words[2] = eight.z;
  words[3] = eight.w;
}

// Rows of one head, `first` and those after it. The last time that they are read the caches let
// them go. Past the end of the sequence its last row comes again: less the means, zeros might be
// the largest numbers.
template <bool last>
__device__ __forceinline__ void load(const Params& params, const Element* in, int first, int pass,
                                     Raw& raw) {
#pragma unroll
  for (int h = 0; h < kHeight; ++h) {
    const int row = min(first + row_of(pass + h), params.seqlen - 1);
    const Element* from = in + row * params.x_stride_seq + column_of(0);
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const uint4* at = reinterpret_cast<const uint4*>(from + 32 * i);
      const uint4 got = last ? __ldcs(at) : __ldg(at);
      put(got, raw[h][i]);
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
        const Pair pair = reinterpret_cast<const Pair&>(raw[h][i][word]);
        y[h][i][2 * word] = float(pair.x);
        y[h][i][2 * word + 1] = float(pair.y);
      }
    }
  }
}

// What all rows of a head share, column by column.
struct alignas(16) Columns {
  float means[32 * kChunks];
  float scales[32 * kChunks];
};

// Puts it into shared memory, each number by one thread of a thread block.
__device__ __forceinline__ void share(const Params& params, const Tile& tile, Columns& columns) {
  const float* means =
      params.mean + tile.batch * params.mean_stride_batch + tile.head * params.mean_stride_head;
  const float* descales = params.descale + tile.batch * params.descale_stride_batch +
                          tile.head * params.descale_stride_head;
#pragma unroll 1
  for (int column = threadIdx.x; column < 32 * kChunks; column += kThreads) {
    columns.means[column] = means[column];
    columns.scales[column] = 1.0f / descales[column];
  }
  __syncthreads();
}

// A lane's numbers of columns of a chunk.
__device__ __forceinline__ void read(const float* of, int chunk, float (&x)[8]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4 four = *reinterpret_cast<const float4*>(of + column_of(chunk) + 4 * half);
    x[4 * half] = four.x;
    x[4 * half + 1] = four.y;
    x[4 * half + 2] = four.z;
    x[4 * half + 3] = four.w;
  }
}

// Takes off the means of columns.
__device__ __forceinline__ void center(const Columns& columns, Values& y) {
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    float mean[8];
    read(columns.means, i, mean);
#pragma unroll
    for (int h = 0; h < kHeight; ++h) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        y[h][i][e] = fmaf(y[h][i][e], kNorm, -mean[e]);
      }
    }
  }
}

// Divides columns by their descales.
__device__ __forceinline__ void divide(const Columns& columns, Values& y) {
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    float scale[8];
    read(columns.scales, i, scale);
#pragma unroll
    for (int h = 0; h < kHeight; ++h) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        y[h][i][e] *= scale[e];
      }
    }
  }
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

// Transposed rows in shared memory, kRows bytes each. Where a row's groups of 16 keys lie depends
// on the row, so that neither those who write one group of 8 rows nor those who read 8 groups of
// one meet in a bank.
__device__ __forceinline__ int tile_offset(int column, int group) {
  const int turn = (column / 8 % 4 * 2 + column % 2) / (8 / kWarps);
  return column * kRows + (group ^ turn) * 16;
}

// Puts a warp's 16 keys there. A pair of keys is the 16-bit element that stmatrix transposes; lanes
// hold them in the key order of P.
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
      *reinterpret_cast<uint4*>(out + column * params.values_stride_row + key) =
          *reinterpret_cast<const uint4*>(tile + tile_offset(column, group));
    }
  }
}

// A warp's rows, in the values that are rounded but for a scale.
template <bool last>
__device__ __forceinline__ void get(const Params& params, const Element* in, const Tile& tile,
                                    Columns& columns, int first, int pass, Values& y) {
  Raw raw;
  load<last>(params, in, first, pass, raw);
  // The first rows are on their way while a thread block makes out what it is to know of columns.
  if (pass == 0) {
    share(params, tile, columns);
  }
  widen(raw, y);
  center(columns, y);
  divide(columns, y);
}

// Of two rows' numbers of a column those of both: the sum (0), the least (1) and the largest (2).
__device__ __forceinline__ float together(int number, float a, float b) {
  return number == 0 ? a + b : number == 1 ? fminf(a, b) : fmaxf(a, b);
}

constexpr int kLines =
    kColumnThreads / kColumnLanes;  // rows that threads read together, 8 columns each

// What is known of the columns of kColumnRows rows of a head.
__global__ void __launch_bounds__(kColumnThreads, kColumnBlocks)
    find_columns(const __grid_constant__ Params params) {
  const Tile tile(params, params.column_tiles, blockIdx.x);
  const int line = threadIdx.x / kColumnLanes, column = threadIdx.x % kColumnLanes * 8;
  const int first = tile.index * kColumnRows, last = min(params.seqlen, first + kColumnRows);
  const Element* in =
      params.x + tile.batch * params.x_stride_batch + tile.head * params.x_stride_head + column;
  float sum[8] = {};
  Pair least[4], most[4];
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    least[word] = __floats2half2_rn(INFINITY, INFINITY);
    most[word] = __floats2half2_rn(-INFINITY, -INFINITY);
  }
#pragma unroll 8
  for (int row = first + line; row < (line < kLines ? last : 0); row += kLines) {
    const uint4 got = __ldg(reinterpret_cast<const uint4*>(in + row * params.x_stride_seq));
    const uint32_t words[4] = {got.x, got.y, got.z, got.w};
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const Pair pair = reinterpret_cast<const Pair&>(words[word]);
      sum[2 * word] += float(pair.x);
      sum[2 * word + 1] += float(pair.y);
      least[word] = __hmin2(least[word], pair);
      most[word] = __hmax2(most[word], pair);
    }
  }

  alignas(16) __shared__ float lines[kColumnNumbers][kLines][kHeadDim];
  if (line < kLines) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      lines[0][line][column + e] = sum[e];
    }
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      lines[1][line][column + 2 * word] = float(least[word].x);
      lines[1][line][column + 2 * word + 1] = float(least[word].y);
    }
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      lines[2][line][column + 2 * word] = float(most[word].x);
      lines[2][line][column + 2 * word + 1] = float(most[word].y);
    }
  }
  __syncthreads();
  const int64_t place =
      (int64_t(tile.batch) * params.heads.value + tile.head) * params.column_tiles.value +
      tile.index;
  float* to = params.numbers + place * (kColumnNumbers * kHeadDim);
  for (int c = threadIdx.x; c < kHeadDim; c += kColumnThreads) {
    float numbers[kColumnNumbers];
#pragma unroll
    for (int n = 0; n < kColumnNumbers; ++n) {
      numbers[n] = lines[n][0][c];
    }
#pragma unroll 4
    for (int other = 1; other < kLines; ++other) {
#pragma unroll
      for (int n = 0; n < kColumnNumbers; ++n) {
        numbers[n] = together(n, numbers[n], lines[n][other][c]);
      }
    }
#pragma unroll
    for (int n = 0; n < kColumnNumbers; ++n) {
      to[n * kHeadDim + c] = numbers[n];
    }
  }
}

// Of these, what is known of a head's columns.
__global__ void __launch_bounds__(kReduceThreads)
    reduce_columns(const __grid_constant__ Params params) {
  constexpr int kParts = kReduceThreads / kHeadDim;
  const int part = threadIdx.x / kHeadDim, column = threadIdx.x % kHeadDim;
  const int batch = params.heads.divide(blockIdx.x), head = blockIdx.x - batch * params.heads.value;
  const float* from =
      params.numbers +
      int64_t(blockIdx.x) * params.column_tiles.value * (kColumnNumbers * kHeadDim) + column;
  float sum = 0.0f, least = INFINITY, most = -INFINITY;
#pragma unroll 4
  for (int tile = part; tile < (part < kParts ? params.column_tiles.value : 0); tile += kParts) {
    const float* numbers = from + int64_t(tile) * (kColumnNumbers * kHeadDim);
    sum += numbers[0];
    least = fminf(least, numbers[kHeadDim]);
    most = fmaxf(most, numbers[2 * kHeadDim]);
  }
  __shared__ float parts[kColumnNumbers][kReduceThreads];
  parts[0][threadIdx.x] = sum;
  parts[1][threadIdx.x] = least;
  parts[2][threadIdx.x] = most;
  __syncthreads();
  if (threadIdx.x < kHeadDim) {
    for (int other = threadIdx.x + kHeadDim; other < kParts * kHeadDim; other += kHeadDim) {
      sum += parts[0][other];
      least = fminf(least, parts[1][other]);
      most = fmaxf(most, parts[2][other]);
    }
  }
  float mean = sum / float(params.seqlen);
  if (threadIdx.x < kHeadDim) {
    params.mean[batch * params.mean_stride_batch + head * params.mean_stride_head + column] = mean;
    const float top = fmaxf(most - mean, mean - least);
    params
        .descale[batch * params.descale_stride_batch + head * params.descale_stride_head + column] =
        fmaxf(top, kLeast) / kLargest;
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
  __shared__ Columns columns;

  constexpr float scale = 1.0f;  // columns have theirs
  const Tile& to = from;

  uint8_t* out =
      params.values + to.batch * params.values_stride_batch + to.head * params.values_stride_head;
  alignas(128) __shared__ uint8_t tile[32 * kChunks * kRows];
  Packed packed[2];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    Values y;
    get<true>(params, in, from, columns, first, pass, y);
#pragma unroll
    for (int h = 0; h < kHeight; ++h) {
      pack(y[h], scale, packed[pass + h]);
      if (first + row_of(pass + h) >= params.seqlen) {  // what pads the keys is zero
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
          packed[pass + h][i][0] = packed[pass + h][i][1] = 0;
        }
      }
    }
  }
  transpose(tile, packed);
  __syncthreads();
  store(params, out, to.index * kRows, tile);
}

}  // namespace fagen_quant_fp16_d128_center_scol_vcols_kernel

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
  void* values;   // e4m3 (batch, heads, 128, ceil(seqlen / 16) · 16): x is values * descale plus
                  // mean; transposed, keys in the order of P
  void* descale;  // fp32 (batch, heads, 128): what values are to be multiplied by
  void* mean;     // fp32 (batch, heads, 128): what is taken off columns, their means over all rows
  int64_t x_stride_batch, x_stride_head, x_stride_seq;
  int64_t cos_stride_batch, cos_stride_seq;
  int64_t sin_stride_batch, sin_stride_seq;
  int64_t values_stride_batch, values_stride_head, values_stride_seq;
  int64_t descale_stride_batch, descale_stride_head;
  int64_t mean_stride_batch, mean_stride_head;
  int32_t batch, heads, seqlen;
  uint32_t descale_given;  // 1: descale is read; 0: it is found and written
  uint32_t mean_given;     // 1: mean is read; 0: it is found and written
  uint32_t signs[8];       // random bits not read: nothing is rotated
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
int fagen_quant_fp16_d128_center_scol_vcols(const struct FagenQuantizeArgs* args, void* stream);
// How many bytes of workspace a call of these sizes needs; -1 where args is null, or a call of such
// sizes is refused.
int64_t fagen_quant_fp16_d128_center_scol_vcols_workspace(const struct FagenQuantizeArgs* args);
const char* fagen_quant_fp16_d128_center_scol_vcols_message(int status);
const struct FagenKernelInfo* fagen_quant_fp16_d128_center_scol_vcols_info(void);

}  // extern "C"

// ---- The host's side -------------------------------------------------------------------------

#include "fagen_host.h"
#if FAGEN_HOST_H != 0xa95921b9
#error "the fagen_host.h beside this kernel is that of another version of fagen"
#endif

namespace fagen_quant_fp16_d128_center_scol_vcols_host {

using namespace fagen_quant_fp16_d128_center_scol_vcols_kernel;
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
    "descale and mean go together; only one is given",
    "a tensor that is needed is null",
    "a tensor does not begin at a multiple of 16 bytes",
    "a stride is negative, too large, or no multiple of 16 bytes",
    "elements of an output (values, descale, mean) overlap: a stride is 0 or too small",
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
  if (double(ceil_div(a.seqlen, 512)) * double(a.heads) * double(a.batch) >= 1 << 30) {
    return kTooMany;
  }
  return kOk;
}

// Of a call whose sizes are checked, which has fewer than 2^30 of what each record is of.
int64_t workspace_bytes([[maybe_unused]] const FagenQuantizeArgs& a) {
  return a.descale_given ? 0 : int64_t(a.batch) * a.heads * ceil_div(a.seqlen, 512) * 384 * 4;
}

Status check(const FagenQuantizeArgs& a) {
  if (a.struct_bytes != sizeof(a) || a.version != FAGEN_QUANTIZE_ARGS) {
    return kWrongStruct;
  }
  if (const Status status = check_sizes(a)) {
    return status;
  }
  if (a.mean_given != a.descale_given) {
    return kRefused;
  }
  for (const Status status : {
           check_tensor(a.x, 2, true, false, kMostStride, 128,
                        {{a.batch, a.x_stride_batch},
                         {a.seqlen, a.x_stride_seq},
                         {a.heads, a.x_stride_head}}),
           check_tensor(a.values, 1, true, true, kMostStride, ceil_div(a.seqlen, 16) * 16,
                        {{a.batch, a.values_stride_batch},
                         {a.heads, a.values_stride_head},
                         {128, a.values_stride_seq}}),
           check_tensor(a.descale, 4, true, !a.descale_given, 1073741824, 128,
                        {{a.batch, a.descale_stride_batch}, {a.heads, a.descale_stride_head}}),
           check_tensor(a.mean, 4, true, !a.mean_given, 1073741824, 128,
                        {{a.batch, a.mean_stride_batch}, {a.heads, a.mean_stride_head}}),
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
  params.numbers = static_cast<float*>(a.workspace);
  params.column_tiles = FastDivisor(int(ceil_div(a.seqlen, kColumnRows)));
  params.mean = static_cast<float*>(a.mean);
  params.mean_stride_batch = a.mean_stride_batch;
  params.mean_stride_head = a.mean_stride_head;
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

  if (!a.descale_given) {
    find_columns<<<dim3(int64_t(a.heads) * ceil_div(a.seqlen, 512) * a.batch, 1, 1), 256, 0,
                   stream>>>(params);
  }
  if (!a.descale_given) {
    reduce_columns<<<dim3(int64_t(a.heads) * a.batch, 1, 1), 1024, 0, stream>>>(params);
  }
  quantize<<<dim3(int64_t(a.heads) * ceil_div(a.seqlen, 128) * a.batch, 1, 1), 256, 0, stream>>>(
      params);
  return cudaGetLastError() == cudaSuccess ? kOk : kLaunchFailed;
}

}  // namespace fagen_quant_fp16_d128_center_scol_vcols_host

extern "C" int fagen_quant_fp16_d128_center_scol_vcols(const FagenQuantizeArgs* args,
                                                       void* stream) {
  using namespace fagen_quant_fp16_d128_center_scol_vcols_host;
  const Status status = args ? check(*args) : kNullPointer;
  return status ? status : launch(*args, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t fagen_quant_fp16_d128_center_scol_vcols_workspace(
    const FagenQuantizeArgs* args) {
  using namespace fagen_quant_fp16_d128_center_scol_vcols_host;
  return args && !check_sizes(*args) ? workspace_bytes(*args) : -1;
}

extern "C" const char* fagen_quant_fp16_d128_center_scol_vcols_message(int status) {
  using namespace fagen_quant_fp16_d128_center_scol_vcols_host;
  constexpr int kNoKernel = 100;  // of who chooses among kernels
  return status >= 0 && status <= kLaunchFailed ? kMessages[status]
         : status == kNoKernel                  ? "no kernel computes that"
                                                : "unknown status";
}

extern "C" const FagenKernelInfo* fagen_quant_fp16_d128_center_scol_vcols_info(void) {
  using namespace fagen_quant_fp16_d128_center_scol_vcols_kernel;
  static const FagenKernelInfo info = {
      sizeof(FagenKernelInfo),
      kSharedBytes,
      kThreads,
      kLaunchRegisters,
      "quant_fp16_d128_center_scol_vcols",
      "22ced65fb4a7988419808b1eb763a6bf338f727f9ff0ec7ab1adfc85199e8ecb"};
  return &info;
}
// sha256 of what is above: d75e6144ec587e1309acb716540caaeefe9c717631846d0b819c77a637dda0a1
