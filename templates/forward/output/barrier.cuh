constexpr int kAllConsumers = kStore + 2 * kConsumers;
