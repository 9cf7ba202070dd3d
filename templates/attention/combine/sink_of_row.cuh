  float base = plus(times(reference, scale), of_mean), of_keys = sum, old;
  combine_sink(sink, base, sum, old);
  of_keys = times(of_keys, old);
  total[0] = times(total[0], old);
  total[1] = times(total[1], old);
