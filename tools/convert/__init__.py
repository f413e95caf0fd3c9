"""Convert a published model (GGUF or Hugging Face folder) to a Skerry model folder."""
