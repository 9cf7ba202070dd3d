  TileFinder{params}.count_all(shared.counted);
