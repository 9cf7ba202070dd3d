// What the launchers of fagen's kernels have in common: how calls end, checks of tensors, tensor
// maps, launches. Written by fagen beside kernels; do not edit. Needs the CUDA toolkit alone.
#ifndef FAGEN_HOST_H
#define FAGEN_HOST_H 0xa95921b9  // of this text: kernels of another version of fagen refuse it

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <initializer_list>

namespace fagen_host {

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

constexpr int kAlignment =
    16;  // bytes, of base pointers, strides that TMA follows, and the workspace

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
static inline Status check_tensor(const void* data, int element_bytes, bool aligned, bool written,
                                  int64_t most, int64_t row, std::initializer_list<Dim> dims) {
  bool empty = row == 0, strides_fit = true, overlaps = false;
  double reach = double(row);  // elements from the first one to the last
  for (const Dim& dim : dims) {
    empty |= dim.size == 0;
    if (dim.size > 1) {
      strides_fit &= dim.stride >= 0 && dim.stride <= most &&
                     (!aligned || dim.stride * element_bytes % kAlignment == 0);
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
  if (reinterpret_cast<uintptr_t>(data) % (aligned ? kAlignment : element_bytes) != 0) {
    return kMisaligned;
  }
  return !strides_fit || reach * element_bytes >= 0x1p62 ? kBadStride : overlaps ? kOverlap : kOk;
}

static inline bool is_hopper(int device) {
  int major = 0, minor = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess &&
         major == 9 && minor == 0;
}

// Whether the current device is a Hopper GPU.
static inline bool is_hopper() {
  int device = 0;
  return cudaGetDevice(&device) == cudaSuccess && is_hopper(device);
}

// SMs of the current device, once the kernel is configured there for so much shared memory; 0 if it
// is no Hopper GPU.
template <auto* kernel>
static int prepare_device(int shared_bytes) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) {
    return 0;
  }
  if (device < kDevices && known[device].load(std::memory_order_acquire) > 0) {
    return known[device].load(std::memory_order_relaxed);
  }
  int multiprocessors = 0;
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (!is_hopper(device) ||
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes) !=
          cudaSuccess) {
    return 0;
  }
  if (device < kDevices) {
    known[device].store(multiprocessors, std::memory_order_release);
  }
  return multiprocessors;
}

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// Found at run time, so that the library loads where there is no driver.
static inline EncodeTiled encode_tiled() {
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

// A tensor as the caller laid it out, its first dimension contiguous, and the box of it that TMA
// copies at a time.
struct Tensor {
  const void* data;
  int64_t sizes[4];
  int64_t strides[3];  // of all dimensions but the first, in elements
  int box[4];
  CUtensorMapSwizzle swizzle;
  CUtensorMapDataType type;
  int64_t element_bytes;
  CUtensorMapL2promotion promotion;
};

// How long a dimension is in a map: an empty tensor is never read, but its map cannot be empty.
static inline cuuint64_t described_size(const Tensor& t, int dim) {
  const bool empty = std::min({t.sizes[0], t.sizes[1], t.sizes[2]}) == 0;
  return empty ? 1 : t.sizes[dim];
}

static inline cuuint64_t described_stride(const Tensor& t, int dim) {
  return described_size(t, dim) <= 1 ? 16 : t.strides[dim - 1] * t.element_bytes;
}

static inline bool describe(CUtensorMap* map, const Tensor& t) {
  cuuint64_t sizes[4], strides[3];
  cuuint32_t box[4];
  for (int i = 0; i < 4; ++i) {
    sizes[i] = described_size(t, i);
    box[i] = t.box[i];
  }
  for (int i = 0; i < 3; ++i) {
    strides[i] = described_stride(t, i + 1);
  }
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  return encode_tiled()(map, t.type, 4, const_cast<void*>(t.data), sizes, strides, box, steps,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, t.swizzle, t.promotion,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// The same of a tensor whose rows, its second dimension, are those of many sequences, one after the
// other, with heads as its third. The map has `ragged` rows, of which each sequence takes the last
// ones: row r of `length` is row ragged - length + r, and what a box has beyond the end is outside
// of the map, whatever lies there. Two more dimensions lead to where the sequence is: `ragged` in
// one goes as many rows back, by a stride that makes 2^64 of them wrap around to zero, and in the
// other the row behind the sequence goes forward.
static inline bool describe_varlen(CUtensorMap* map, const Tensor& t, int ragged) {
  const int64_t row = described_stride(t, 1), head = described_stride(t, 2);
  const int64_t wrapping = (int64_t(1) << 34) * t.element_bytes;
  const cuuint64_t sizes[5] = {described_size(t, 0), cuuint64_t(ragged), described_size(t, 2),
                               INT32_MAX, INT32_MAX};
  const cuuint64_t strides[4] = {cuuint64_t(row), cuuint64_t(head), cuuint64_t(wrapping - row),
                                 cuuint64_t(row)};
  const cuuint32_t box[5] = {cuuint32_t(t.box[0]), cuuint32_t(t.box[1]), 1, 1, 1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  return encode_tiled()(map, t.type, 5, const_cast<void*>(t.data), sizes, strides, box, steps,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, t.swizzle, t.promotion,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// The same of a tensor whose heads are its second dimension, and its rows the third: a box has
// several heads of a row.
static inline bool describe_varlen_heads_first(CUtensorMap* map, const Tensor& t, int ragged) {
  const int64_t head = described_stride(t, 1), row = described_stride(t, 2);
  const int64_t wrapping = (int64_t(1) << 34) * t.element_bytes;
  const cuuint64_t sizes[5] = {described_size(t, 0), described_size(t, 1), cuuint64_t(ragged),
                               INT32_MAX, INT32_MAX};
  const cuuint64_t strides[4] = {cuuint64_t(head), cuuint64_t(row), cuuint64_t(wrapping - row),
                                 cuuint64_t(row)};
  const cuuint32_t box[5] = {cuuint32_t(t.box[0]), cuuint32_t(t.box[1]), cuuint32_t(t.box[2]), 1,
                             1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  return encode_tiled()(map, t.type, 5, const_cast<void*>(t.data), sizes, strides, box, steps,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, t.swizzle, t.promotion,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Enqueues a kernel that may begin under the end of the launch before it, and waits for what that
// one writes.
template <class Params>
static bool enqueue(void (*kernel)(Params), int64_t blocks, int threads, int shared_bytes,
                    cudaStream_t stream, const Params& params) {
  if (blocks == 0) {
    return true;  // there is nothing that it would do
  }
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, params) == cudaSuccess;
}

constexpr int kMostGrid = 65535;  // thread blocks in y and z

// Launches a kernel for some heads after others, where a grid does not hold all of them.
template <class Params, class Launch>
static void by_heads(Params& params, int heads, const Launch& launch) {
  for (params.first_head = 0; params.first_head < heads; params.first_head += kMostGrid) {
    launch(std::min(heads - params.first_head, kMostGrid));
  }
}

// The same for some heads and batches after others.
template <class Params, class Launch>
static void by_heads(Params& params, int heads, int batches, const Launch& launch) {
  for (params.first_batch = 0; params.first_batch < batches; params.first_batch += kMostGrid) {
    by_heads(params, heads,
             [&](int some) { launch(some, std::min(batches - params.first_batch, kMostGrid)); });
  }
}

}  // namespace fagen_host

#endif
// sha256 of what is above: f1732cfe757aaecfc95858ae6385d0a619837c8619fa2153960f75813d1404bc
