  // O += PV, with nothing else under way.
  __device__ __forceinline__ void add_pv(Output& o, Probabilities& p) {
    issue_pv(o, p);
    finish_pv(o);
  }
