  divide(columns, y);
