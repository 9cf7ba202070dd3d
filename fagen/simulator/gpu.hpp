// A Hopper GPU in C++, as far as fagen's kernels use one: their text, with asm statements turned into calls (see
// translate.py), runs thread by thread on a CPU.
//
// Threads are fibers, and what is asynchronous on a GPU is so here: copies and products happen at any time between
// their issue and what waits for them, drawn by chance from a seed. So a wait that is missing shows sooner or later as
// a wrong number, and a barrier nobody arrives at as a deadlock, told by who waits for what. Shared memory is seen by
// wgmma and TMA as it was at the last fence. Not modelled: time, the registers of a thread, proxies of global memory,
// and launches that overlap.
#pragma once

#include "cuda.hpp"
