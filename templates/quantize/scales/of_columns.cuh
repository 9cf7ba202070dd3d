  constexpr float scale = 1.0f;  // columns have theirs
  const Tile& to = from;
