
  uint8_t* out = params.values + to.batch * params.values_stride_batch + to.head * params.values_stride_head;
