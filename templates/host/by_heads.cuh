constexpr int kMostGrid = 65535;  // thread blocks in y and z

// Launches a kernel for some heads after others, where a grid does not hold all of them.
template <class Params, class Launch>
static void by_heads(Params& params, int heads, const Launch& launch) {
  for (params.first_head = 0; params.first_head < heads; params.first_head += kMostGrid) {
    launch(std::min(heads - params.first_head, kMostGrid));
  }
}

// The same for some heads and batches after others.
template <class Params, class Launch>
static void by_heads(Params& params, int heads, int batches, const Launch& launch) {
  for (params.first_batch = 0; params.first_batch < batches; params.first_batch += kMostGrid) {
    by_heads(params, heads, [&](int some) { launch(some, std::min(batches - params.first_batch, kMostGrid)); });
  }
}
