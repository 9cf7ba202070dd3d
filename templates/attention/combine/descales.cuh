  const int kv_head = params.heads_per_kv_head.divide(head);
  float q_scale = 0.0f, k_scale = 0.0f;
  if (there) {
    q_scale = params.q_scale.data ? __ldg(params.q_scale.at(batch, head)) : 1.0f;
    k_scale = params.k_scale.data ? __ldg(params.k_scale.at(batch, kv_head)) : 1.0f;
  }
  const float scale = params.scale * q_scale * k_scale;  // of the products of bytes
  // What K's mean, taken off before K was quantised, adds to the row's scores.
  float of_mean = 0.0f;
  if (params.lse && params.k_mean.data) {
    constexpr int kLanes = kCombineLanes < 32 ? kCombineLanes : 32;
    if (there) {
      const Element* const q =
          params.q_rows + batch * params.q_stride_batch + head * params.q_stride_head + position * params.q_stride_seq;
      const float* const mean = params.k_mean.of(batch, kv_head);
      for (int i = threadIdx.x % kLanes; i < kHeadDim; i += kLanes) {
        of_mean = fmaf(float(q[i]), __ldg(mean + i * params.k_mean.stride_column), of_mean);
      }
    }
#pragma unroll
    for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
      of_mean += __shfl_xor_sync(0xffffffffu, of_mean, lanes);
    }
    of_mean *= params.scale * q_scale;
  }
  // A number of each of this lane's two columns.
  const auto of_columns = [&](const ColumnTensor& numbers, float otherwise) {
    const float* const at = numbers.data ? numbers.of(batch, kv_head) + column * numbers.stride_column : nullptr;
    return at ? make_float2(__ldg(at), __ldg(at + numbers.stride_column)) : make_float2(otherwise, otherwise);
  };
