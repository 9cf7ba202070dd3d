  // Of more heads where one has many tiles: each of those waits for the one before it, and fewer should be in work at once.
  const int64_t share = kL2Share / 2 * (n_blocks > 32 ? 4 : n_blocks > 8 ? 3 : 2);
