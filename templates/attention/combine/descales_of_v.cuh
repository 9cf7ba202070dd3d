  const int kv_head = params.heads_per_kv_head.divide(head);
  const float scale = params.scale;  // of scores, which Q and K's descales are part of
  const float of_mean = 0.0f;        // nothing was taken off K
  // A number of each of this lane's two columns.
  const auto of_columns = [&](const ColumnTensor& numbers, float otherwise) {
    const float* const at = numbers.data ? numbers.of(batch, kv_head) + column * numbers.stride_column : nullptr;
    return at ? make_float2(__ldg(at), __ldg(at + numbers.stride_column)) : make_float2(otherwise, otherwise);
  };
