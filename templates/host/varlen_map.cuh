// The same of a tensor whose rows, its second dimension, are those of many sequences, one after the other, with heads as
// its third. The map has `ragged` rows, of which each sequence takes the last ones: row r of `length` is row
// ragged - length + r, and what a box has beyond the end is outside of the map, whatever lies there. Two more dimensions
// lead to where the sequence is: `ragged` in one goes as many rows back, by a stride that makes 2^64 of them wrap around to
// zero, and in the other the row behind the sequence goes forward.
static inline bool describe_varlen(CUtensorMap* map, const Tensor& t, int ragged) {
  const int64_t row = described_stride(t, 1), head = described_stride(t, 2);
  const int64_t wrapping = (int64_t(1) << 34) * t.element_bytes;
  const cuuint64_t sizes[5] = {described_size(t, 0), cuuint64_t(ragged), described_size(t, 2), INT32_MAX, INT32_MAX};
  const cuuint64_t strides[4] = {cuuint64_t(row), cuuint64_t(head), cuuint64_t(wrapping - row), cuuint64_t(row)};
  const cuuint32_t box[5] = {cuuint32_t(t.box[0]), cuuint32_t(t.box[1]), 1, 1, 1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  return encode_tiled()(map, t.type, 5, const_cast<void*>(t.data), sizes, strides, box, steps,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, t.swizzle, t.promotion,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}
