  const bool alike = !a.seqused_k && !a.leftpad_k;
