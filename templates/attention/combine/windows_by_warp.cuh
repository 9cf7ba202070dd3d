  Share share = load_share(0);
  Window window;
  load(window);
#pragma unroll 1
  for (int weighed_from = 0; weighed_from < most; weighed_from += kWeighed) {
    const Share next_share = load_share(weighed_from + kWeighed);
    float so_far = share.x;  // the largest of this lane's and those before it
#pragma unroll
    for (int lanes = 1; lanes < kWeighed; lanes *= 2) {
      so_far = fmaxf(so_far, __shfl_up_sync(0xffffffffu, so_far, lanes, kWeighed));
    }
    const float before = __shfl_up_sync(0xffffffffu, so_far, 1, kWeighed);
    const float weight = weigh(params.rise(weighed == 0 ? reference : fmaxf(reference, before), share.x), 0.0f);
    const float weighed_sum = times(share.y, own_weight(weight));
    reference = fmaxf(reference, __shfl_sync(0xffffffffu, so_far, kWeighed - 1, kWeighed));
    const int end = min(kWeighed, most - weighed_from);
#pragma unroll 1
    for (int begin = 0; begin < end; begin += kWindow) {
      Window next;
      load(next);
#pragma unroll
      for (int i = 0; i < kWindow; ++i) {
        const float of_split = __shfl_sync(0xffffffffu, weight, begin + i, kWeighed);
        const float old = old_weight(of_split), own = own_weight(of_split);
        total[0] = accumulate(total[0], window.numbers[i].x, old, own);
        total[1] = accumulate(total[1], window.numbers[i].y, old, own);
        sum = plus(times(sum, old), __shfl_sync(0xffffffffu, weighed_sum, begin + i, kWeighed));
      }
      window = next;
    }
    share = next_share;
  }
