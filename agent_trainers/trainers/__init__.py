"""Trainers on top of TRL; the only package besides the commands that imports it."""
