  // The row maxima with a block of scores. Of floats of which one is not negative, the largest is that of their bits; of
  // three integers one instruction (VIMNMX3) finds it. Where all are negative, that is the least, and floats are compared.
  __device__ __forceinline__ void find_top(const float (&s)[kBlockN / 2], float (&top)[2]) const {
    constexpr int kRowScores = kBlockN / 4;
    int largest[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto bits = [&](int i) { return __float_as_int(s[i / 2 * 4 + r * 2 + i % 2]); };
      int even = ::max(::max(bits(0), bits(1)), __float_as_int(max[r]));  // two chains, to hide latency
      int odd = ::max(::max(bits(2), bits(3)), bits(4));
#pragma unroll
      for (int i = 5; i + 3 < kRowScores; i += 4) {
        even = ::max(::max(bits(i), bits(i + 1)), even);
        odd = ::max(::max(bits(i + 2), bits(i + 3)), odd);
      }
      even = ::max(::max(bits(kRowScores - 3), bits(kRowScores - 2)), even);
      largest[r] = ::max(::max(even, odd), bits(kRowScores - 1));
      top[r] = __int_as_float(largest[r]);
    }
    if ((largest[0] | largest[1]) < 0) {
      float chains[4];
      find_largest<kBlockN / 2>(s, chains);
      top[0] = fmaxf(max[0], fmaxf(chains[0], chains[2]));
      top[1] = fmaxf(max[1], fmaxf(chains[1], chains[3]));
    }
  }
