// Of two rows' numbers of a column those of both: the sum (0), the least (1) and the largest (2).
__device__ __forceinline__ float together(int number, float a, float b) {
  return number == 0 ? a + b : number == 1 ? fminf(a, b) : fmaxf(a, b);
}
