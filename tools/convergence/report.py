"""Gaps and verdicts."""


class Report:
    is_good = True

    @staticmethod
    def of(rows):
        return Report()

    def show(self, console): ...
