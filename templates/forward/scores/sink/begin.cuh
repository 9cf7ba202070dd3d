  // A row begins with its sink, a score whose value is zero: with a sum that is so large that its keys do not change it
  // but where they count, and with a reference that is as much lower, lest their P be too small for its bits.
  __device__ __forceinline__ void begin_with(float sink, int r, float factor) {
    max[r] = fmaxf(fminf((sink - kSinkLead) * factor, kLargestSink), kNoScore);
    sum[r] = sink == sink ? kSinkShare : sink;  // NaN would be lost as a maximum
  }
