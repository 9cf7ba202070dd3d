  params.maxima_of_one = int64_t(params.tiles.value) * a.heads * a.batch;
  params.descale_stride_batch = params.descale_stride_head = 0;
