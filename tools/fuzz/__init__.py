"""Random verify graphs, compiled and run, against eager execution: a hunt for miscompiles."""
