  using Sloped = Packed;  // P times slopes, in 16 bits: registers are few, or it goes through shared memory

  __device__ __forceinline__ static void keep_sloped(Sloped& sloped, int i, float a, float b) { sloped[i / 2] = pack(a, b); }

