  // All keys of a split.
  __device__ __forceinline__ void take(const Unit& unit) {
    const Keys seen = seen_by_all(unit);
    begin(unit);
    shared.q_full[q.stage].wait(q.phase);
    Scores s;
    first_scores(s);
    int key = unit.first_key;
    for (; key + kBlockN < unit.last_key; key += kBlockN) {
      step(unit, seen, key, s);
      finish_scores(s);
    }
    last_step(unit, seen, key, s);
    finish(unit);
  }
