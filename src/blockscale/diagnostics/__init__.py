"""What the library chose and why, whether this machine computes right, and what quantisation does to a tensor."""

from .doctor import DoctorReport, doctor
from .explain import explain
from .quality import Quality, measure

__all__ = ["DoctorReport", "Quality", "doctor", "explain", "measure"]
