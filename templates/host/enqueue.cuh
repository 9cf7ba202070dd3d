// Enqueues a kernel that may begin under the end of the launch before it, and waits for what that one writes.
template <class Params>
static bool enqueue(void (*kernel)(Params), int64_t blocks, int threads, int shared_bytes, cudaStream_t stream, const Params& params) {
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
