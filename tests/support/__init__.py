"""Modules that tests share: inputs, references, models, and programs that tests start as processes of their own."""
