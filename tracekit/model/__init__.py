"""The only room that imports transformers: loading models, reading their specs, the one hook."""
