// How many clusters are resident at once, by their size and the shared memory of a thread block.
// The runtime knows: nothing is launched.

#include "micro.cuh"

__global__ void body() {
  aligned_smem()[threadIdx.x] = 0;
}

int main(int argc, char** argv) {
  return measured(argc, argv, [](Rows& rows) {
    for (const int kb : {75, 220}) {
      for (const int size : {2, 4, 8, 16}) {
        const std::string what =
            "clusters of " + std::to_string(size) + " at " + std::to_string(kb) + " KB";
        rows.row(
            what, "clusters",
            [&] {
              const Launch how = {size * 16, 160, kb * kKB, size};
              prepare(body, how);
              cudaLaunchAttribute attributes[2] = {};
              const cudaLaunchConfig_t config = configuration(how, attributes);
              int count;
              ok(cudaOccupancyMaxActiveClusters(&count, body, &config),
                 "cudaOccupancyMaxActiveClusters");
              return double(count);
            },
            field("size", size) + field("kb", kb));
      }
    }
  });
}
