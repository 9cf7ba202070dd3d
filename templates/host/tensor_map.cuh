// A tensor as the caller laid it out, its first dimension contiguous, and the box of it that TMA copies at a time.
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

static inline bool describe(CUtensorMap* map, const Tensor& t) {
  cuuint64_t sizes[4], strides[3];
  cuuint32_t box[4];
  for (int i = 0; i < 4; ++i) {
    sizes[i] = std::max<int64_t>(1, t.sizes[i]);  // an empty tensor is never read, but its map cannot be empty
    box[i] = t.box[i];
  }
  for (int i = 0; i < 3; ++i) {
    strides[i] = t.sizes[i + 1] <= 1 ? 16 : t.strides[i] * t.element_bytes;
  }
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  return encode_tiled()(map, t.type, 4, const_cast<void*>(t.data), sizes, strides, box, steps,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, t.swizzle, t.promotion,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}
