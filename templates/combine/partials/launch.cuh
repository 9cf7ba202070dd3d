  const int shared_bytes = std::min(a.splits, kStages) * sizeof(Stage);
