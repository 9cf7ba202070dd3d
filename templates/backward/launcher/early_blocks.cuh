  params.row_blocks_count = m_blocks * a.heads * a.batch;
  params.m_blocks_divisor = FastDivisor(m_blocks);
  params.early_blocks = 0;
  if (params.shares == 1 && tiles > 0) {  // a section is of whole heads, in a row
    params.section_blocks = FastDivisor(int(section) * params.group * m_blocks);
    params.early_blocks = (params.sections - 1) * params.section_blocks.value;
  }
