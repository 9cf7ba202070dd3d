  Loader loader{params, shared};  // used by one thread of warpgroup 0 only
