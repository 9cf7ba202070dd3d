  sum_sinks<<<a.heads, kRowThreads, 0, stream>>>(params);
