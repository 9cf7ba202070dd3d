// What the microbenchmarks of decoding share: rows of results, times of streams and graphs, copies
// by TMA.
//
// A program is called as `program ROWS FIRST`: it appends a line of JSON to the file ROWS before
// and after each measurement, and leaves out those before number FIRST. So whoever runs it knows
// which one hung or broke the context, and goes on behind it in a new process.
#pragma once

#include <cuda.h>  // CUtensorMap; the driver's functions are found at run time
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

// ---- rows ---------------------------------------------------------------------------------------

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void ok(cudaError_t error, const char* doing) {
  if (error != cudaSuccess) {
    cudaGetLastError();  // what is not sticky must not be found again by the next measurement
    throw Failure(std::string(doing) + ": " + cudaGetErrorString(error));
  }
}

class Rows {
 public:
  Rows(int argc, char** argv) {
    if (argc != 3) {
      std::fprintf(stderr, "usage: %s ROWS FIRST\n", argv[0]);
      std::exit(2);
    }
    file_ = std::fopen(argv[1], "a");
    if (!file_) {
      std::perror(argv[1]);
      std::exit(2);
    }
    first_ = std::atoi(argv[2]);
  }

  // Measure one thing, unless an earlier process did. `more` are fields of JSON, each ended by a
  // comma.
  template <class Measure>
  void row(const std::string& what, const char* unit, Measure&& measure,
           const std::string& more = "") {
    const int number = next_++;
    if (number < first_) {
      return;
    }
    const std::string about = "\"row\": " + std::to_string(number) + ", \"what\": \"" + what +
                              "\", " + more + "\"unit\": \"" + unit + "\"";
    write("{" + about + ", \"begun\": true}");
    try {
      const double value = measure();
      ok(cudaDeviceSynchronize(), "afterwards");
      char text[32];
      std::snprintf(text, sizeof(text), "%.6g", value);
      write("{" + about + ", \"value\": " + text + "}");
    } catch (const Failure& failure) {
      std::string said = failure.what();
      std::replace(said.begin(), said.end(), '"', '\'');
      write("{" + about + ", \"error\": \"" + said + "\"}");
      if (cudaDeviceSynchronize() != cudaSuccess) {
        std::exit(3);  // the context is lost, and with it everything that was allocated
      }
    }
  }

 private:
  void write(const std::string& line) {
    std::fprintf(file_, "%s\n", line.c_str());
    std::fflush(file_);
  }

  std::FILE* file_;
  int first_, next_ = 0;
};

static __global__ void spin(long long clocks) {
  const long long began = clock64();
  while (clock64() - began < clocks) {
  }
}

// Run a program's measurements, when the clock is up; what fails outside of a row ends it.
template <class Measurements>
int measured(int argc, char** argv, Measurements&& measurements) {
  Rows rows(argc, argv);
  try {
    spin<<<256, 128>>>(300'000'000);
    ok(cudaDeviceSynchronize(), "the first kernel");
    measurements(rows);
  } catch (const Failure& failure) {
    std::fprintf(stderr, "%s\n", failure.what());
    return 2;
  }
  return 0;
}

// A field of JSON, as Rows::row takes it.
inline std::string field(const char* name, double value) {
  char text[64];
  std::snprintf(text, sizeof(text), "\"%s\": %g, ", name, value);
  return text;
}

// ---- memory and launches ------------------------------------------------------------------------

constexpr int kKB = 1024;

inline int sm_count() {
  int device, count;
  ok(cudaGetDevice(&device), "cudaGetDevice");
  ok(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
     "cudaDeviceGetAttribute");
  return count;
}

template <class T>
T* allocated(size_t count) {
  void* found;
  ok(cudaMalloc(&found, count * sizeof(T)), "cudaMalloc");
  ok(cudaMemset(found, 0, count * sizeof(T)), "cudaMemset");
  return static_cast<T*>(found);
}

template <class T>
std::vector<T> fetched(const T* from, size_t count) {
  std::vector<T> host(count);
  ok(cudaMemcpy(host.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return host;
}

template <class T>
void sent(T* to, const std::vector<T>& host) {
  ok(cudaMemcpy(to, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
}

inline cudaStream_t stream() {
  static const cudaStream_t made = [] {
    cudaStream_t one;
    ok(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking), "cudaStreamCreate");
    return one;
  }();
  return made;
}

struct Launch {
  int grid, threads;
  int smem = 0;  // dynamic, bytes
  int cluster = 1;
  bool overlapping =
      false;  // programmatic dependent launch: may start under the end of the kernel before
};

// Once before a kernel's first launch: so that launches themselves are nothing but launches.
template <class... P>
void prepare(void (*kernel)(P...), const Launch& how) {
  ok(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, how.smem),
     "shared memory");
  if (how.cluster > 8) {
    ok(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
       "a cluster above 8");
  }
}

// A launch's configuration; the attributes must live as long as it does.
inline cudaLaunchConfig_t configuration(const Launch& how, cudaLaunchAttribute (&attributes)[2]) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(how.grid);
  config.blockDim = dim3(how.threads);
  config.dynamicSmemBytes = how.smem;
  config.stream = stream();
  config.attrs = attributes;
  if (how.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = how.cluster;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  }
  if (how.overlapping) {
    cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  return config;
}

template <class... P, class... A>
void launch(void (*kernel)(P...), const Launch& how, A&&... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  const cudaLaunchConfig_t config = configuration(how, attributes);
  ok(cudaLaunchKernelEx(&config, kernel, P(arguments)...), "a launch");
}

// ---- times --------------------------------------------------------------------------------------

inline double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// Microseconds between two events around what is enqueued; `ahead` is enqueued before the first of
// them.
template <class Ahead, class Enqueue>
double between_events_us(Ahead&& ahead, Enqueue&& enqueue, int rounds) {
  cudaEvent_t before, after;
  ok(cudaEventCreate(&before), "cudaEventCreate");
  ok(cudaEventCreate(&after), "cudaEventCreate");
  std::vector<double> times;
  for (int round = 0; round < rounds + 2; ++round) {
    ahead();
    ok(cudaEventRecord(before, stream()), "cudaEventRecord");
    enqueue();
    ok(cudaEventRecord(after, stream()), "cudaEventRecord");
    ok(cudaEventSynchronize(after), "a kernel");
    float ms;
    ok(cudaEventElapsedTime(&ms, before, after), "cudaEventElapsedTime");
    if (round >= 2) {  // the first two are warm-up
      times.push_back(ms * 1e3);
    }
  }
  ok(cudaEventDestroy(before), "cudaEventDestroy");
  ok(cudaEventDestroy(after), "cudaEventDestroy");
  return median(times);
}

// Microseconds on the GPU of what is enqueued launch by launch: a spinning kernel ahead of it gives
// the CPU time to enqueue all of it.
template <class Enqueue>
double eager_us(Enqueue&& enqueue, int rounds = 9) {
  return between_events_us([] { spin<<<1, 1, 0, stream()>>>(4'000'000); }, enqueue, rounds);
}

// The median of microseconds that one replay of a graph takes, in which `record` was captured.
template <class Record>
double graph_us(Record&& record, int rounds = 9) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec;
  ok(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
  try {
    record();
  } catch (const Failure&) {
    cudaStreamEndCapture(stream(), &graph);  // or the stream would capture for ever
    cudaGetLastError();
    throw;
  }
  ok(cudaStreamEndCapture(stream(), &graph), "cudaStreamEndCapture");
  ok(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
  ok(cudaGraphUpload(exec, stream()), "cudaGraphUpload");
  const double us = between_events_us(
      [] {}, [&] { ok(cudaGraphLaunch(exec, stream()), "cudaGraphLaunch"); }, rounds);
  ok(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
  ok(cudaGraphDestroy(graph), "cudaGraphDestroy");
  return us;
}

// Clocks of a multiprocessor per microsecond, now.
inline double clocks_per_us() {
  constexpr long long kClocks = 4'000'000;
  return kClocks / between_events_us([] {}, [] { spin<<<1, 1, 0, stream()>>>(kClocks); }, 3);
}

// ---- tensor maps --------------------------------------------------------------------------------

// Dimensions from the innermost on: extents and box in elements of 16 bits, strides in bytes from
// the second on.
inline CUtensorMap tensor_map(void* base, std::vector<cuuint64_t> extents,
                              std::vector<cuuint64_t> strides, std::vector<cuuint32_t> box,
                              bool swizzled = true,
                              CUtensorMapL2promotion promoted = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  ok(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                      &result),
     "cuTensorMapEncodeTiled");
  if (result != cudaDriverEntryPointSuccess) {
    throw Failure("this driver has no cuTensorMapEncodeTiled");
  }
  CUtensorMap map;
  const std::vector<cuuint32_t> steps(extents.size(), 1);
  const CUresult error = reinterpret_cast<Encode>(function)(
      &map, CU_TENSOR_MAP_DATA_TYPE_UINT16, cuuint32_t(extents.size()), base, extents.data(),
      strides.data(), box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
      swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
      promoted, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error != CUDA_SUCCESS) {
    throw Failure("cuTensorMapEncodeTiled refuses the map: CUresult " + std::to_string(error));
  }
  return map;
}

// ---- on the device ------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return uint32_t(__cvta_generic_to_shared(pointer));
}

// Dynamic shared memory from the next multiple of 1,024 bytes on, where a 128-byte swizzle begins
// anew.
__device__ __forceinline__ unsigned char* aligned_smem() {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  return dynamic_smem + (-smem_address(dynamic_smem) & 1023);
}

__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals)
               : "memory");
}

__device__ __forceinline__ void barriers_visible() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void expect_bytes(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)),
      "r"(bytes)
      : "memory");
}

__device__ __forceinline__ bool try_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      "  .reg .pred p;\n"
      "  mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "  selp.b32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(smem_address(barrier)), "r"(parity)
      : "memory");
  return done;
}

__device__ __forceinline__ uint64_t global_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Waits two seconds at most: a copy that never lands becomes an error instead of a hang.
__device__ __forceinline__ void wait(uint64_t* barrier, uint32_t parity) {
  uint64_t began = 0;
  while (!try_wait(barrier, parity)) {
    const uint64_t now = global_ns();
    began = began ? began : now;
    if (now - began > 2'000'000'000) {
      __trap();
    }
  }
}

__device__ __forceinline__ void prefetch(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The encodings of createpolicy.fractional.L2 for all of what is read, as CUTLASS has them.
constexpr uint64_t kEvictNormal = 0x1000000000000000;
constexpr uint64_t kEvictFirst = 0x12F0000000000000;

__device__ __forceinline__ void load_box(void* tile, const CUtensorMap* map, uint64_t* barrier,
                                         uint64_t policy, int x, int y, int z, int u) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(smem_address(tile)),
      "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(u), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void load_box(void* tile, const CUtensorMap* map, uint64_t* barrier,
                                         uint64_t policy, int x, int y, int z, int u, int v) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(smem_address(tile)),
      "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void wait_for_primary() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
