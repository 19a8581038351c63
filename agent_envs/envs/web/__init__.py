"""Tasks on web sites."""
