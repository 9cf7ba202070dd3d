static inline bool is_hopper(int device) {
  int major = 0, minor = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess && major == 9 &&
         minor == 0;
}

// Whether the current device is a Hopper GPU.
static inline bool is_hopper() {
  int device = 0;
  return cudaGetDevice(&device) == cudaSuccess && is_hopper(device);
}

// SMs of the current device, once the kernel is configured there for so much shared memory; 0 if it is no Hopper GPU.
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
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes) != cudaSuccess) {
    return 0;
  }
  if (device < kDevices) {
    known[device].store(multiprocessors, std::memory_order_release);
  }
  return multiprocessors;
}
