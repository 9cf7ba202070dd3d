  // Leaves 64 rows of a gradient as they are, where other thread blocks have the rest of the group.
  template <int all, int count>
  __device__ __forceinline__ void keep(float (&share)[all], const float (&gradient)[count]) {
    float4* to = reinterpret_cast<float4*>(share) + first_row() * count / 2 + threadIdx.x % kWarpgroup;
#pragma unroll
    for (int i = 0; i < count; i += 4) {
      to[i / 4 * kWarpgroup] = {gradient[i], gradient[i + 1], gradient[i + 2], gradient[i + 3]};
    }
  }

