  // Tiles that are alike stay whole, as many in each run, where that leaves few thread blocks out: those that go abreast
  // share lines of L2, which stay there while nobody is far ahead.
  const int64_t of_run = (groups + most_runs - 1) / most_runs, even_runs = of_run > 0 ? (groups + of_run - 1) / of_run : 0;
  if (alike && units > 0 && even_runs * 10 >= most_runs * 7) {
    params.of_run = int(of_run);
    whole_groups = groups;
    runs = even_runs;
  }
