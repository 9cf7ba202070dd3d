// The output is transposed: rows of keys, padded with zeros to a multiple of 16, and each 16 in the order
// 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15 in which the PV GEMM takes P from registers.
