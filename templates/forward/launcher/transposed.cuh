  const int64_t padded = ceil_div(a.seqlen_k, kPatchKeys) * kPatchKeys;  // keys of a column of V, once it is transposed
  params.v_columns = static_cast<Element*>(a.workspace);
