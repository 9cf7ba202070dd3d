// What all threads of a block before or after have, added up in one order; of use to the first.
__device__ __forceinline__ float sum_of_block(float own) {
  __shared__ float sums[kRowThreads / 32];
#pragma unroll
  for (int other = 16; other > 0; other /= 2) {
    own += __shfl_xor_sync(0xffffffff, own, other);
  }
  if (lane() == 0) {
    sums[threadIdx.x / 32] = own;
  }
  __syncthreads();
  float sum = 0.f;
#pragma unroll
  for (int warp = 0; warp < kRowThreads / 32; ++warp) {
    sum += sums[warp];
  }
  return sum;
}

// The weight of a sink in its row, whose LSE has it too: all of it where no key has any.
__device__ __forceinline__ float weight_of_sink(float sink, float lse) {
  return sink == lse ? 1.f : exp2_approx((sink - lse) * 1.44269504089f);
}
