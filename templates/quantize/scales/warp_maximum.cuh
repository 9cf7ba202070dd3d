// The largest of a warp's numbers, none of which is negative: as integers they have the same order.
__device__ __forceinline__ float warp_maximum(float top) {
  return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(top)));
}
