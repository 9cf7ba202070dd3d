  // Issues dQᵀ = Kᵀ dSᵀ: of some rows, or some columns of K.
  template <int count>
  __device__ __forceinline__ void issue_dq(float (&dq)[count], const Element* rows, const Element* columns) {
    multiply_dq<kQkSlab, kDsSlab>(dq, along_columns<kBlockN, kQkSlab>(columns, kQkDescriptor),
                                  along_columns<kBlockN, kDsSlab>(rows, kDsDescriptor));
  }

