"""Diagnosis of failed episodes."""
