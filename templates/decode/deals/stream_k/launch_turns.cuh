  // Else splits of what is left are taken in turns, by runs that have no tile more than others.
  if (alike && units > 0 && whole_groups == 0 && groups >= sm_runs) {
    params.of_run = int(groups / most_runs);
    longer_runs = groups < most_runs ? sm_runs : 0;
    whole_groups = params.of_run * most_runs + longer_runs;
    whole_groups -= whole_groups % params.tile_groups.value;  // of whole sequences
  }
