  const int queries = kWarpgroupRows / pack, packs = a.heads / pack;
  params.pack = FastDivisor(pack);
  params.queries = queries;
  params.tile_queries = FastDivisor(kConsumers * queries);
  params.heads_per_kv_head = FastDivisor(group / pack);
