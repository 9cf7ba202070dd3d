// A lane's numbers of columns of a chunk.
__device__ __forceinline__ void read(const float* of, int chunk, float (&x)[8]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4 four = *reinterpret_cast<const float4*>(of + column_of(chunk) + 4 * half);
    x[4 * half] = four.x;
    x[4 * half + 1] = four.y;
    x[4 * half + 2] = four.z;
    x[4 * half + 3] = four.w;
  }
}
