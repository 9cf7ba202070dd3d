  const int64_t share = kL2Share;
