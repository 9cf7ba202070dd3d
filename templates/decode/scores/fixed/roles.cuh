  Producer producer{params, shared};
  Consumer consumer{params, shared};
  const bool loads = warp == kWarps;
  const auto run = [&](bool again) { loads ? producer.run(again) : consumer.run(again); };
  run(false);
  if (__syncthreads_or(consumer.failed)) {
    consumer.exact = true;
    run(true);  // a row that failed, by its own maxima: its bits depend on no other row
  }
