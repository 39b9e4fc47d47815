"""Loss and gap over steps."""


def draw(report, path): ...
