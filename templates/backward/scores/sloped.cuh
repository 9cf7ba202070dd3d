  using Sloped = Scores;  // P times slopes

  __device__ __forceinline__ static void keep_sloped(Sloped& sloped, int i, float a, float b) {
    sloped[i] = a;
    sloped[i + 1] = b;
  }

