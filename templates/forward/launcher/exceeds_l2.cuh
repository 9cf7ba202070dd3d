  params.exceeds_l2 = int64_t(a.total_k) * a.kv_heads * (kHeadDim + kHeadDimV) * sizeof(Element) > kL2Bytes;
