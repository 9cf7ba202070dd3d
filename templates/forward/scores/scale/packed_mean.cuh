  // What K's mean, taken off before K was quantised, adds to a row's scores, in log2 units. Four lanes share a row, one of
  // the warpgroup's.
  __device__ __forceinline__ float mean_score(const Tile& tile, int row) {
    float sum = 0.f;
    if (first_row(tile) + query_of(row) < seqlen_q(tile)) {
      const Element* q = q_row(tile, row);
      const float* mean = params.k_mean.of(tile.batch, tile.kv_head);
#pragma unroll 1
      for (int column = lane() % 4; column < kHeadDim; column += 4) {
        sum = fmaf(float(q[column]), __ldg(mean + column * params.k_mean.stride_column), sum);
      }
      sum *= q_scale_of(tile, row);
    }
    return params.scale_log2 * quad_sum(sum);
  }
