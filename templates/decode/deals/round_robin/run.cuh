  __device__ __forceinline__ void run() {
    Units units(params);
    Unit unit;
    for (int number = blockIdx.x; units.find(number, unit); number += gridDim.x) {
      take(unit);
    }
  }
