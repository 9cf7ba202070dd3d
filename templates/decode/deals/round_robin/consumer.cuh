  // All keys of a split.
  __device__ __forceinline__ void take(const Unit& unit) {
    const Keys seen = seen_by_all(unit);
    begin(unit);
    if (unit.first_key < unit.last_key) {  // a sequence that has none is a unit where nobody else writes its output
      shared.q_full[q.stage].wait(q.phase);
      Scores s;
      first_scores(s);
      int key = unit.first_key;
      for (; key + kBlockN < unit.last_key; key += kBlockN) {
        step(unit, seen, key, s);
        finish_scores(s);
      }
      last_step(unit, seen, key, s);
    } else {
      meet();  // nobody still reads the sums of the unit before
    }
    finish(unit);
  }
