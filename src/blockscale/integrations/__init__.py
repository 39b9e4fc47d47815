"""Recipes in torchtitan and in Transformers' Trainer. Neither is imported by default."""
