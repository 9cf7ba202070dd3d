// Of the sums of dQ, in the order of a warpgroup's accumulators: sixteen columns of 64 rows.
using Piece = float4[2 * kWarpgroup];
