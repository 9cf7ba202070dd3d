  // The tensor cores cut sums off instead of rounding them. So every kPromote blocks O is added to an fp32 total and starts at
  // zero; the total is rescaled only then, by the product of all factors since.
  bool begun = false;  // whether there is a total yet
  float missed[2] = {1.f, 1.f};
