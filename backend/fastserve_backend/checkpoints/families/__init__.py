"""Each family's config.json, read into a `DecoderConfig`. No module here imports torch."""
