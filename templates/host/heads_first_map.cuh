// The same of a tensor whose heads are its second dimension, and its rows the third: a box has several heads of a row.
static inline bool describe_varlen_heads_first(CUtensorMap* map, const Tensor& t, int ragged) {
  const int64_t head = described_stride(t, 1), row = described_stride(t, 2);
  const int64_t wrapping = (int64_t(1) << 34) * t.element_bytes;
  const cuuint64_t sizes[5] = {described_size(t, 0), described_size(t, 1), cuuint64_t(ragged), INT32_MAX, INT32_MAX};
  const cuuint64_t strides[4] = {cuuint64_t(head), cuuint64_t(row), cuuint64_t(wrapping - row), cuuint64_t(row)};
  const cuuint32_t box[5] = {cuuint32_t(t.box[0]), cuuint32_t(t.box[1]), cuuint32_t(t.box[2]), 1, 1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  return encode_tiled()(map, t.type, 5, const_cast<void*>(t.data), sizes, strides, box, steps,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, t.swizzle, t.promotion,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}
