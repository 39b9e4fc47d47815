"""The command line: one file per command. Heavy packages are imported inside the commands, so that help is instant."""
