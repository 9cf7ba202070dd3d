// A lane's share of a row, whose pairs are of columns half a row apart.
__device__ __forceinline__ void embed(const Element* cos, const Element* sin, uint32_t (&row)[kChunks][4]) {
#pragma unroll
  for (int i = 0; i < kChunks / 2; ++i) {
    const uint4 c = __ldg(reinterpret_cast<const uint4*>(cos + column_of(i)));
    const uint4 s = __ldg(reinterpret_cast<const uint4*>(sin + column_of(i)));
    rotate_pair(row[i][0], row[i + kChunks / 2][0], c.x, s.x);
    rotate_pair(row[i][1], row[i + kChunks / 2][1], c.y, s.y);
    rotate_pair(row[i][2], row[i + kChunks / 2][2], c.z, s.z);
    rotate_pair(row[i][3], row[i + kChunks / 2][3], c.w, s.w);
  }
}
