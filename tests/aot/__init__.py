"""Gates on machine code, without a GPU: `compiled` makes and reads it, `cases` says what it must be like."""
