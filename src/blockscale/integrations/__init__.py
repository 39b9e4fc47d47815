"""Recipes inside other people's trainers: torchtitan and Transformers. Each is imported only by who asks for it."""
