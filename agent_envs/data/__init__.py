"""Sources of tasks: files, data sets on the hub, and what a row holds."""
