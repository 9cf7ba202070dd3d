  // O is rescaled where PV is added to it.
  __device__ __forceinline__ void rescale_output(Output&, Softmax& softmax) {
    if (!softmax.raised) {
      softmax.rescale[0] = softmax.rescale[1] = 1.f;
    }
  }
