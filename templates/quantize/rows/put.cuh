__device__ __forceinline__ void put(const uint4& eight, uint32_t (&words)[4]) {
  words[0] = eight.x;
  words[1] = eight.y;
  words[2] = eight.z;
  words[3] = eight.w;
}
