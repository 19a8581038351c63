"""Complete, runnable settings, one YAML file each."""
