  __device__ __forceinline__ void run() {
    Units units(params);
    Unit unit;
    // back and forth: who has one of the first units, which take longest, has none of the last
    int step = 2 * int(gridDim.x - blockIdx.x) - 1;
    for (int number = blockIdx.x; units.find(number, unit); number += step, step = 2 * int(gridDim.x) - step) {
      take(unit);
    }
  }
