"""From documents to rows of tokens: sources, tokenizers, packing, shards, and the order of rows."""
