  if (warpgroup < kConsumers) {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    Consumer<false>{params, shared, warpgroup - 1}.run();
  } else {
    cutlass::arch::warpgroup_reg_alloc<kDqRegisters>();
    Consumer<true>{params, shared, warpgroup - 1}.run();
  }
