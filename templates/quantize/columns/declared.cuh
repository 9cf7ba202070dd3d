  __shared__ Columns columns;

