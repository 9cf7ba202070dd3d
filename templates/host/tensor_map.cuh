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
