  // P of a block of scores, relative to the row maxima so far; part: its row sums. Returns whether this thread's P fits,
  // which small sums prove.
  __device__ __forceinline__ bool guess(const float (&s)[kBlockN / 2], float (&p)[kBlockN / 2], float (&part)[2]) const {
    const float offset[2] = {-reference(0), -reference(1)};
    return exponentiate(s, p, part, offset) && !far;
  }
