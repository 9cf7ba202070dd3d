  params.maxima_of_one = params.tiles.value;
