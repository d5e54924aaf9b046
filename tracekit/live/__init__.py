"""The KV engine inside a model: rows after the eviction point run anew, layer by layer, exactly."""
