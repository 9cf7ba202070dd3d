  const int64_t last = 1;
