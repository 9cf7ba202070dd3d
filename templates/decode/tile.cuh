constexpr int kWarpgroup = 128;
constexpr int kWarps = kWarpgroup / 32;
constexpr int kTileM = 64;                              // the M of every wgmma
constexpr int kKeyTiles = kBlockN / kTileM;             // of Sᵀ, along the keys
constexpr int kColumnTiles = kHeadDimVPadded / kTileM;  // of Oᵀ, along the columns of V

// A thread's part of a warpgroup's accumulators, and what it keeps of its columns.
using Scores = float[kKeyTiles][kRows / 2];
using Output = float[kColumnTiles][kRows / 2];
using Statistics = float[kRows / 4];
