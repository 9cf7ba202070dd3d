__device__ __forceinline__ void apply_rotary(const Params& params, int batch, int first, int pass, Raw& raw) {
#pragma unroll
  for (int h = 0; h < kHeight; ++h) {
    const int row = first + row_of(pass + h);
    if (row >= params.seqlen) {
      continue;
    }
    const Element* cos = params.cos + batch * params.cos_stride_batch + row * params.cos_stride_seq;
    const Element* sin = params.sin + batch * params.sin_stride_batch + row * params.sin_stride_seq;
    embed(cos, sin, raw[h]);
  }
}
