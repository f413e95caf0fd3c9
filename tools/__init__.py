"""Host-side programs: convert a model, fetch the default one, bench and report. Nothing here is installed on a board."""
