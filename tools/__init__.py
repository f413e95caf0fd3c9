"""Host-side programs: fetch and convert a model, bench and report. Nothing here is installed on a board."""
