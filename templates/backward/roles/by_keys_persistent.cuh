  {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    Consumer{params, shared, warpgroup - 1}.run();
  }
