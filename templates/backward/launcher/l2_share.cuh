  // Tiles come in sections of heads whose rows fit their share of the L2 cache.
  const int64_t flat_heads = int64_t(a.kv_heads) * a.batch * shares;
  const int64_t head_bytes = int64_t(a.seqlen_q) * params.share_heads * ((kHeadDim + kHeadDimV) * sizeof(Element) + kHeadDim * sizeof(float));
