__device__ __forceinline__ void store(Output* to, const float (&numbers)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector; i += 4) {
    __stcg(reinterpret_cast<float4*>(to + i),
           make_float4(numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3]));
  }
}
