  params.combined = reinterpret_cast<Combined*>(params.shares + rows * kNumSplits);
