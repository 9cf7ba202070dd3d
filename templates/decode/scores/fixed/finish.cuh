  // Hands the split's output on. A row that was too far below its reference says so, and is computed again.
  __device__ __forceinline__ void finish(const Unit& unit) {
    for_each_row(unit, [&](int j, float total, int position, int head) {
      const Keys seen = seen_by(Lengths{params.seqlen_q, unit.sequence.length}, position);
      const int keys = max(0, min(seen.last, unit.last_key) - max(seen.first, unit.first_key));
      const bool fails = !exact && !(total >= kLeastMean * keys);  // it may be no number
      failed |= fails;
      const int64_t index = params.partial(unit.batch, unit.split, position, head);
      store_partial(j, index);
      if (thread_row() == 0) {
        const Share share = share_of(reference[j], total);
        __stcg(params.shares + index, fails ? make_float2(INFINITY, 0.0f) : share);
      }
    });
  }
