  float base = times(reference, params.scale), old;
  combine_sink(sink, base, sum, old);
  total[0] = times(total[0], old);
  total[1] = times(total[1], old);
