"""`specdec inspect`: how a drafter checkpoint is read, and whether another reading would accept
more.
"""

from specdec.inspection.parity import Reading, Trial, alternatives, try_readings
from specdec.inspection.report import describe, table

__all__ = ["Reading", "Trial", "alternatives", "describe", "table", "try_readings"]
