  std::copy_n(a.signs, kChunks, params.signs);
