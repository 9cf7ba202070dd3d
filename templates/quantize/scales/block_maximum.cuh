// The largest of a thread block's numbers, for its first warp.
template <int warps>
__device__ __forceinline__ float block_maximum(float top) {
  __shared__ float tops[warps];
  top = warp_maximum(top);
  if (lane_id() == 0) {
    tops[threadIdx.x / 32] = top;
  }
  __syncthreads();
  return warp_maximum(tops[lane_id() % warps]);
}
