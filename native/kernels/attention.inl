// Attention of M rows over a paged cache.
