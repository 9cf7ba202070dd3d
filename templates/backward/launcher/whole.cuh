  params.cut_keys = 0;
  params.kept_keys = shares > 1 ? a.seqlen_k : 0;
