  center(columns, y);
