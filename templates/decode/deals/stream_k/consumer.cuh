  // All keys of a unit; each split's end runs under the scores of the next.
  __device__ __forceinline__ void take(Unit& unit) {
    const Keys seen = seen_by_all(unit);
    combines = unit.split == 0;
    begin_combining();
    begin(unit);
    shared.q_full[q.stage].wait(q.phase);
    const int split = split_keys(params, unit.sequence.length);
    Scores s;
    first_scores(s);
    int key = unit.first_key;
    for (; key + kBlockN < unit.last_key; key += kBlockN) {
      step(unit, seen, key, s);
      if (key + kBlockN == unit.first_key + split) {
        finish(unit, false);
        unit.first_key += split;
        ++unit.split;
        begin(unit);
      }
      finish_scores(s);
    }
    last_step(unit, seen, key, s);
    finish(unit, true);
  }
