// What a launch costs: alone and as one of a chain, eager and in a graph, with programmatic
// dependent launch (PDL), in clusters, with shared memory.

#include "micro.cuh"

__global__ void empty() {}

__global__ void chained() {
  launch_dependents();
  wait_for_primary();
}

constexpr int kChain = 100;

template <class Kernel>
void kind(Rows& rows, const std::string& name, Kernel kernel, const Launch& how) {
  const auto times = [&](int count) {
    return [&, count] {
      for (int i = 0; i < count; ++i) {
        launch(kernel, how);
      }
    };
  };
  rows.row(name + ", alone, eager", "us", [&] {
    prepare(kernel, how);
    return eager_us(times(1));
  });
  rows.row(name + ", two, eager", "us", [&] {
    prepare(kernel, how);
    return eager_us(times(2));
  });
  rows.row(name + ", each further of a chain, eager", "us", [&] {
    prepare(kernel, how);
    return (eager_us(times(1 + kChain)) - eager_us(times(1))) / kChain;
  });
  rows.row(name + ", alone, graph", "us", [&] {
    prepare(kernel, how);
    return graph_us(times(1));
  });
  rows.row(name + ", two, graph", "us", [&] {
    prepare(kernel, how);
    return graph_us(times(2));
  });
  rows.row(name + ", each further of a chain, graph", "us", [&] {
    prepare(kernel, how);
    return (graph_us(times(1 + kChain)) - graph_us(times(1))) / kChain;
  });
  rows.row(name + ", the CPU's time for a launch", "us", [&] {
    prepare(kernel, how);
    std::vector<double> taken;
    for (int round = 0; round < 9; ++round) {
      ok(cudaStreamSynchronize(stream()), "a kernel");
      const auto began = std::chrono::steady_clock::now();
      times(kChain)();
      const std::chrono::duration<double, std::micro> passed =
          std::chrono::steady_clock::now() - began;
      taken.push_back(passed.count() / kChain);
    }
    return median(taken);
  });
}

int main(int argc, char** argv) {
  return measured(argc, argv, [](Rows& rows) {
    constexpr int kGrid = 128, kThreads = 160;  // whole clusters of 16; a producer and a warpgroup
    rows.row("two events with nothing between", "us", [] { return eager_us([] {}); });
    kind(rows, "plain", empty, {kGrid, kThreads});
    kind(rows, "plain, 75 KB", empty, {kGrid, kThreads, 75 * kKB});
    kind(rows, "PDL", chained, {kGrid, kThreads, 0, 1, true});
    kind(rows, "cluster 8", empty, {kGrid, kThreads, 0, 8});
    kind(rows, "cluster 16", empty, {kGrid, kThreads, 0, 16});
    kind(rows, "cluster 8, PDL", chained, {kGrid, kThreads, 0, 8, true});
  });
}
