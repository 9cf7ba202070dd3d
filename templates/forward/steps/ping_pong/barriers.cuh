constexpr int kScheduler = kStore + kConsumers;  // and up: the turn of each
