"""What `octavo bench` measures: one file a claim, each with the gate that has to pass first."""
