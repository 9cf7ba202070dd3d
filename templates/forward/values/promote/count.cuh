  // Counts a block. Every kPromote of them O moves to its total, and whether it does is returned.
  __device__ __forceinline__ bool promotes(Output& o, Softmax& softmax) {
    if (++softmax.blocks == kPromote) {
      promote(o, softmax);
      softmax.missed[0] = softmax.rescale[0];
      softmax.missed[1] = softmax.rescale[1];
      return true;
    }
    softmax.missed[0] *= softmax.rescale[0];
    softmax.missed[1] *= softmax.rescale[1];
    return false;
  }
