using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// Found at run time, so that the library loads where there is no driver.
static inline EncodeTiled encode_tiled() {
  static const EncodeTiled found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(function)
                                                                         : nullptr;
  }();
  return found;
}
