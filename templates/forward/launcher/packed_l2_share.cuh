  // Tiles come in sections of heads whose K and V fit their share of the L2 cache; heads that share tiles count as one.
  const int64_t flat_heads = int64_t(packs) * a.batch;
  const int64_t head_bytes = int64_t(a.seqlen_k) * (kHeadDim + kHeadDimV) * sizeof(Element);
  const int64_t cached_kv_heads = kL2Share / std::max<int64_t>(1, head_bytes);
