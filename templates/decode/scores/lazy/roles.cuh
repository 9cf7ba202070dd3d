  if (warp == kWarps) {
    Producer{params, shared}.run();
  } else {
    Consumer{params, shared}.run();
  }
