  if (warpgroup < kConsumers) {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    Consumer<false>{params, shared, warpgroup - 1}.run(tile);
  } else {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    Consumer<true>{params, shared, warpgroup - 1}.run(tile);
  }
