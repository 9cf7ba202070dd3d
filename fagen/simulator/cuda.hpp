// The names that kernels and their launchers know all this by: CUDA's, CUTLASS's and the runtime's.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

#include "tensor_cores.hpp"

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static  // of a kernel whose blocks run one after another
#define __align__(n) alignas(n)
#define __launch_bounds__(...)
#define __grid_constant__
#define __cluster_dims__(...)

// ---- Threads -------------------------------------------------------------------------------

#define threadIdx (sim::dim3_of(sim::self().index))
#define blockIdx (sim::self().block->index)
#define blockDim (sim::machine.block)
#define gridDim (sim::machine.grid)
namespace sim {
inline dim3 dim3_of(int index) { return {unsigned(index), 0, 0}; }
}  // namespace sim

template <class T>
T __ldcg(const T* from) {
  return *from;
}
template <class T>
T __ldcs(const T* from) {
  return *from;
}
template <class T>
T __ldg(const T* from) {
  return *from;
}
template <class T>
void __stcg(T* to, T value) {
  *to = value;
}
inline uint32_t atomicInc(uint32_t* at, uint32_t most) {
  const uint32_t before = *at;
  *at = before >= most ? 0 : before + 1;
  return before;
}
inline uint32_t atomicAdd(uint32_t* to, uint32_t more) {
  const uint32_t before = *to;
  *to = before + more;
  return before;
}
inline uint32_t atomicMax(uint32_t* at, uint32_t least) {
  const uint32_t before = *at;
  *at = before < least ? least : before;
  return before;
}

inline void __threadfence() {}  // here all see all at once

inline size_t __cvta_generic_to_shared(const void* pointer) { return sim::shared_address(pointer); }
inline void __syncthreads() { sim::bar_sync(0, sim::self().block->living); }
inline int __syncthreads_or(int said) { return sim::bar_red_or(0, sim::self().block->living, said); }
inline void __syncwarp(unsigned = ~0u) { sim::meet(); }
template <class T>
T __shfl_sync(unsigned, T value, int from) {
  return sim::from_lane<T>(sim::meet(sim::as_shown(value)), from);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int other) {
  return sim::from_lane<T>(sim::meet(sim::as_shown(value)), sim::lane() ^ other);
}

template <class T>
T __shfl_sync(unsigned, T value, int from, int width) {
  return sim::from_lane<T>(sim::meet(sim::as_shown(value)), sim::lane() / width * width + from % width);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int step, int width = sim::kWarp) {
  const int own = sim::lane();
  return sim::from_lane<T>(sim::meet(sim::as_shown(value)), own % width >= step ? own - step : own);
}
inline int __reduce_max_sync(unsigned, int value) {
  const auto* shown = sim::meet(uint64_t(uint32_t(value)));
  int found = value;
  for (int i = 0; i < sim::kWarp; ++i) {
    found = std::max(found, int(uint32_t(shown[i][0])));
  }
  return found;
}

inline uint32_t __ballot_sync(unsigned, bool vote) {
  const auto* shown = sim::meet(uint64_t(vote));
  uint32_t votes = 0;
  for (int i = 0; i < sim::kWarp; ++i) {
    votes |= uint32_t(shown[i][0]) << i;
  }
  return votes;
}
inline int __reduce_add_sync(unsigned, int value) {
  const auto* shown = sim::meet(uint64_t(uint32_t(value)));
  uint32_t sum = 0;
  for (int i = 0; i < sim::kWarp; ++i) {
    sum += uint32_t(shown[i][0]);
  }
  return int(sum);
}
inline uint32_t __reduce_or_sync(unsigned, uint32_t value) {
  const auto* shown = sim::meet(uint64_t(value));
  uint32_t all = 0;
  for (int i = 0; i < sim::kWarp; ++i) {
    all |= uint32_t(shown[i][0]);
  }
  return all;
}
inline bool __all_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) == ~0u; }
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }

// ---- CUTLASS and the CUDA runtime ----------------------------------------------------------

namespace cutlass::arch {

struct ClusterBarrier : sim::MBarrier {
  using MBarrier::arrive;
  void arrive(uint32_t rank, uint32_t = true) { sim::in_block(sim::self().block->cluster[rank], static_cast<MBarrier*>(this))->arrive(); }
  // Who finds it passed has no need to wait for it, while another lane of the warp has.
  bool test_wait(uint32_t parity) const { return sim::mbarrier_passed(this, parity) && !sim::machine.chance(4); }
  bool try_wait(uint32_t parity) const { return test_wait(parity); }
};
struct ClusterTransactionBarrier : ClusterBarrier {
  void arrive_and_expect_tx(int count) {
    bytes += count;
    arrive();
  }
};
inline void fence_barrier_init() { sim::self().made_barriers = false; }
inline void fence_view_async_shared() { sim::self().block->fenced = true; }
template <int count>
void warpgroup_reg_alloc() {}
template <int count>
void warpgroup_reg_dealloc() {}

}  // namespace cutlass::arch

using CUtensorMap = sim::TensorMap;

namespace cute {

namespace SM90::GMMA {
enum class LayoutType : uint8_t { INTERLEAVE = 0, B128 = 1, B64 = 2, B32 = 3 };
}
namespace TMA {
enum class CacheHintSm90 : uint64_t { EVICT_NORMAL, EVICT_FIRST, EVICT_LAST };
}
inline uint32_t cast_smem_ptr_to_uint(const void* pointer) { return sim::shared_address(pointer); }
inline void prefetch_tma_descriptor(const CUtensorMap*) {}
struct SM90_TMA_LOAD_4D {
  struct PREFETCH {
    static void copy(const CUtensorMap*, int, int, int, int) {}
  };
  static void copy(const CUtensorMap* map, uint64_t* full, uint64_t, void* to, int a, int b, int c, int d) {
    sim::load(*map, *reinterpret_cast<sim::MBarrier*>(full), static_cast<char*>(to), {a, b, c, d}, sim::self().block);
  }
};
struct SM90_TMA_LOAD_5D {
  static void copy(const CUtensorMap* map, uint64_t* full, uint64_t, void* to, int a, int b, int c, int d, int e) {
    sim::load(*map, *reinterpret_cast<sim::MBarrier*>(full), static_cast<char*>(to), {a, b, c, d, e}, sim::self().block);
  }
};
inline void load_multicast(const CUtensorMap& map, uint64_t* full, uint16_t mask, void* to, const std::array<int, 5>& at) {
  for (sim::Block* block : sim::self().block->cluster) {
    if (mask >> block->rank & 1) {
      sim::load(map, *reinterpret_cast<sim::MBarrier*>(full), static_cast<char*>(to), at, block);
    }
  }
}
struct SM90_TMA_LOAD_MULTICAST_4D {
  static void copy(const CUtensorMap* map, uint64_t* full, uint16_t mask, uint64_t, void* to, int a, int b, int c, int d) {
    load_multicast(*map, full, mask, to, {a, b, c, d});
  }
};
struct SM90_TMA_LOAD_MULTICAST_5D {
  static void copy(const CUtensorMap* map, uint64_t* full, uint16_t mask, uint64_t, void* to, int a, int b, int c, int d, int e) {
    load_multicast(*map, full, mask, to, {a, b, c, d, e});
  }
};
inline void cluster_sync() { sim::cluster_sync(); }
struct SM90_TMA_STORE_4D {
  static void copy(const CUtensorMap* map, const void* from, int a, int b, int c, int d) {
    sim::store(*map, static_cast<const char*>(from), {a, b, c, d});
  }
};
struct SM90_TMA_STORE_5D {
  static void copy(const CUtensorMap* map, const void* from, int a, int b, int c, int d, int e) {
    sim::store(*map, static_cast<const char*>(from), {a, b, c, d, e});
  }
};
struct SM90_BULK_COPY_G2S {
  static void copy(const void* from, uint64_t* full, void* to, int bytes) {
    sim::bulk_load(from, *reinterpret_cast<sim::MBarrier*>(full), to, bytes);
  }
};
inline void tma_store_arrive() { sim::bulk_commit(); }
template <int pending>
void tma_store_wait() {
  sim::bulk_wait(pending, 1);
}

}  // namespace cute

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorLaunchFailure };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum { cudaEnableDefault };
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor, cudaDevAttrMultiProcessorCount };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum CUresult { CUDA_SUCCESS };
using cuuint64_t = uint64_t;
using cuuint32_t = uint32_t;
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_DATA_TYPE_FLOAT32 };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_32B, CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data, const cuuint64_t* sizes,
                                       const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave,
                                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  constexpr int kBytes[] = {1, 2, 2, 4};
  *map = {static_cast<char*>(data), int(rank), kBytes[type], int(swizzle), {}, {}, {}};
  map->strides[0] = map->element;
  for (cuuint32_t i = 0; i < rank; ++i) {
    map->sizes[i] = sizes[i];
    map->box[i] = box[i];
    if (i > 0) {
      map->strides[i] = strides[i - 1];
    }
  }
  const bool whole = int(box[0]) * map->element <= (16 << map->swizzle_bits) || map->swizzle_bits == 0;
  return whole && reinterpret_cast<uintptr_t>(data) % 16 == 0 ? CUDA_SUCCESS : CUresult(1);
}
inline cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, int, cudaDriverEntryPointQueryResult* result) {
  *function = reinterpret_cast<void*>(&cuTensorMapEncodeTiled);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what, int) {
  *value = what == cudaDevAttrComputeCapabilityMajor ? 9 : what == cudaDevAttrMultiProcessorCount ? 4 : 0;
  return cudaSuccess;
}
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct { int programmaticStreamSerializationAllowed; } val;
};
struct cudaLaunchConfig_t {
  dim3 grid_dim, block_dim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  const cudaLaunchAttribute* attrs;
  int numAttrs;
};
template <class T>
cudaError_t cudaFuncSetAttribute(T, int, size_t) {
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() {
  const bool failed = sim::machine.failed;
  sim::machine.failed = false;
  return failed ? cudaErrorLaunchFailure : cudaSuccess;
}

// Of how many blocks a kernel's clusters are, where its launch does not say so.
namespace sim {
inline std::map<const void*, int> clusters;

template <class... Parameters>
auto clustered(void (*kernel)(Parameters...), int blocks) {
  clusters[reinterpret_cast<const void*>(kernel)] = blocks;
  return kernel;
}
}  // namespace sim

// What may overlap the launch before it begins after its end here.
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), const Arguments&... arguments) {
  const auto cluster = sim::clusters.find(reinterpret_cast<const void*>(kernel));
  const int blocks = cluster == sim::clusters.end() ? 1 : cluster->second;
  sim::launch(kernel, config->grid_dim, config->block_dim, config->dynamicSmemBytes, blocks, arguments...);
  return cudaGetLastError();
}

extern "C" inline __attribute__((used)) void fagen_simulator_seed(uint64_t seed) { sim::machine.begin(seed); }
// Whether launches are noted, and nothing runs.
extern "C" inline __attribute__((used)) void fagen_simulator_notes(int on) { sim::machine.notes = on; }
// The grids of all launches since the last time it was asked, a line each.
extern "C" inline __attribute__((used)) const char* fagen_simulator_noted() {
  static std::string said;
  said = std::exchange(sim::machine.noted, "");
  return said.c_str();
}
// Why the last call failed.
extern "C" inline __attribute__((used)) const char* fagen_simulator_said() { return sim::machine.said.c_str(); }
